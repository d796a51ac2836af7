"""The APIs that are served: a line for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from afferent.serve.apis.api import Api, TokenCount
from afferent.serve.apis.chat.api import OpenAIChat
from afferent.serve.apis.messages.api import AnthropicMessages
from afferent.serve.apis.responses.api import OpenAIResponses

APIS: Sequence[Api] = (
    OpenAIChat(),
    OpenAIResponses(),
    AnthropicMessages(),
)


def by_path(apis: Sequence[Api]) -> Mapping[str, Api]:
    """These APIs, and those that count their tokens, by where they are asked."""
    counts = [each.api for api in apis for each in api.besides if isinstance(each, TokenCount)]
    return {api.path: api for api in (*apis, *counts)}
