"""Readers of requests for a prompt of vLLM, by the path of the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from afferent.builtin.apis.completions.api import COMPLETIONS
from afferent.builtin.apis.rendering.chat_prompt import ChatPrompt
from afferent.builtin.apis.rendering.completion_prompt import CompletionPrompt
from afferent.builtin.apis.rendering.messages_prompt import CountPrompt, MessagesPrompt
from afferent.builtin.apis.rendering.prompt_request import PromptReader
from afferent.builtin.apis.rendering.responses_prompt import ResponsesPrompt
from afferent.proxy.dialects import CHAT, COUNT_TOKENS, MESSAGES, RESPONSES

READERS: Final[Mapping[str, PromptReader[Any]]] = {
    CHAT.path: PromptReader(ChatPrompt),
    COMPLETIONS.path: PromptReader(CompletionPrompt),
    RESPONSES.path: PromptReader(ResponsesPrompt),
    MESSAGES.path: PromptReader(MessagesPrompt),
    COUNT_TOKENS.path: PromptReader(CountPrompt),
}
