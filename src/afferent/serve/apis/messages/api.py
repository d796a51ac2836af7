"""Anthropic Messages: the request's schema, and what it means in our words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct

from afferent.errors import AfferentError
from afferent.ingest.cutter import MediaKeys
from afferent.serve.apis import schema
from afferent.serve.apis.api import KeyHeader, TokenCount
from afferent.serve.apis.messages.events import AnthropicReply, count_body, error_body
from afferent.serve.apis.messages.input import InputMessage, Text, read_messages
from afferent.serve.flow.call import Call, ReceivedBody
from afferent.serve.flow.request import GenerateRequest

_PROMPT_NO_OPS: schema.NoOpValues = {
    "output_config": ({}, {"effort": None}, {"format": None}, {"effort": None, "format": None}),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"},),
    "tool_choice": ({"type": "none"}, {"type": "auto"}),
    "tools": ([],),
}
_NO_OPS: schema.NoOpValues = {**_PROMPT_NO_OPS, "container": (), "diagnostics": ()}


class _Metadata(Struct, forbid_unknown_fields=True):
    user_id: str | None = None


class _Prompt(schema.AnyRequest, kw_only=True, forbid_unknown_fields=True):
    """What a request to count tokens has, too."""

    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=schema.MAX_PARTS)]
    system: str | Annotated[list[Text], Meta(max_length=schema.MAX_PARTS)] | None = None
    # Accepted; they do not change the answer.
    cache_control: Any = UNSET
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # Accepted with a no-op value only.
    output_config: Any = UNSET
    speed: Any = UNSET
    thinking: Any = UNSET


class MessagesRequest(_Prompt, kw_only=True, forbid_unknown_fields=True):
    max_tokens: schema.MaxTokens
    stop_sequences: Annotated[list[schema.Stop], Meta(max_length=16)] | None = None
    stream: bool | None = False
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: schema.TopP | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**20)] | None = None
    # Accepted; they do not change the answer.
    inference_geo: str | None = None
    metadata: _Metadata | None = None
    service_tier: str | None = None
    # Accepted with a no-op value only.
    container: Any = UNSET
    diagnostics: Any = UNSET


class CountRequest(_Prompt, kw_only=True, forbid_unknown_fields=True):
    """A request to count the prompt's tokens."""


_messages_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(CountRequest)


class _Anthropic:
    """What a request for an answer and one for a number have in common."""

    id_prefix = "msg_"
    media_keys = MediaKeys(urls=("url",), base64=("data",))
    key_header = KeyHeader("x-api-key")

    def error_body(self, error: AfferentError, request_id: str) -> Mapping[str, Any]:
        return error_body(error, request_id)


class AnthropicTokenCount(_Anthropic):
    """How many tokens a prompt has; nothing is generated."""

    name = "anthropic_count_tokens"
    path = "/v1/messages/count_tokens"
    request_type = CountRequest
    besides = ()

    def parse(self, body: ReceivedBody, *, request_id: str, model: str) -> Call:
        request = schema.read(_count_decoder, body.json, served=model, no_ops=_PROMPT_NO_OPS)
        messages = read_messages(request.system, request.messages, body)
        generate = GenerateRequest(request_id=request_id, messages=messages, max_tokens=1)
        return Call(generate, is_stream=False, reply=AnthropicReply(request_id, request.model))


class AnthropicMessages(_Anthropic):
    """See `afferent.serve.apis.api.Api`."""

    name = "anthropic_messages"
    path = "/v1/messages"
    request_type = MessagesRequest
    besides = (TokenCount(api=AnthropicTokenCount(), answer=count_body),)

    def parse(self, body: ReceivedBody, *, request_id: str, model: str) -> Call:
        request = schema.read(_messages_decoder, body.json, served=model, no_ops=_NO_OPS)
        generate = GenerateRequest(
            request_id=request_id,
            messages=read_messages(request.system, request.messages, body),
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop=tuple(request.stop_sequences or ()),
        )
        reply = AnthropicReply(request_id, request.model)
        return Call(generate, is_stream=bool(request.stream), reply=reply)
