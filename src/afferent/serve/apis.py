"""The APIs that are served."""

from __future__ import annotations

from collections.abc import Mapping

from afferent.serve.anthropic import AnthropicMessages, AnthropicTokenCount
from afferent.serve.api import Api
from afferent.serve.openai_chat import OpenAIChat
from afferent.serve.openai_responses import OpenAIResponses

APIS: Mapping[str, Api] = {
    "/v1/chat/completions": OpenAIChat(),
    "/v1/responses": OpenAIResponses(),
    "/v1/messages": AnthropicMessages(),
}
"""By the path that each is asked at."""

TOKEN_COUNTS: Mapping[str, Api] = {
    "/v1/messages/count_tokens": AnthropicTokenCount(),
}
"""Those that are asked how long a prompt is."""
