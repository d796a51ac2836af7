"""The APIs that are served: a line for each."""

from __future__ import annotations

from collections.abc import Sequence

from afferent.serve.apis.api import Api
from afferent.serve.apis.chat.api import OpenAIChat
from afferent.serve.apis.messages.api import AnthropicMessages
from afferent.serve.apis.responses.api import OpenAIResponses

APIS: Sequence[Api] = (
    OpenAIChat(),
    OpenAIResponses(),
    AnthropicMessages(),
)
