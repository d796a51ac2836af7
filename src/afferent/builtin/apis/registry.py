"""Registry of the APIs: a line for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from afferent.builtin.apis.api import Api, TokenCount
from afferent.builtin.apis.chat.api import OpenAIChat
from afferent.builtin.apis.completions.api import OpenAICompletions
from afferent.builtin.apis.messages.api import AnthropicMessages
from afferent.builtin.apis.responses.api import OpenAIResponses
from afferent.builtin.apis.tokens.api import Detokenize, Tokenize, text_body, tokens_body

CONVERSATIONS: Sequence[Api] = (
    OpenAIChat(),
    OpenAIResponses(),
    AnthropicMessages(),
)
APIS: Sequence[Api] = (*CONVERSATIONS, OpenAICompletions())
TOKENS: Sequence[TokenCount] = (
    TokenCount(api=Tokenize(), answer=tokens_body),
    TokenCount(api=Detokenize(), answer=text_body),
)
"""Endpoints outside the APIs."""


def by_path(apis: Sequence[Api], beside: Sequence[TokenCount] = ()) -> Mapping[str, Api]:
    """Return these APIs and their token counts, by path."""
    counts = [each.api for api in apis for each in api.besides if isinstance(each, TokenCount)]
    return {api.path: api for api in (*apis, *counts, *(each.api for each in beside))}
