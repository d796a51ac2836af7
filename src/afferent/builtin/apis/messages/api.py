"""Anthropic Messages: schema of requests, and their translation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, structs

from afferent.builtin.apis import forms, parameters, schema
from afferent.builtin.apis.api import TokenCount
from afferent.builtin.apis.asking import BuiltinApi, with_parameters, with_template
from afferent.builtin.apis.messages.events import AnthropicReply, count_body
from afferent.builtin.apis.messages.input import InputMessage, Text, read_messages
from afferent.builtin.apis.messages.tools import add_tools
from afferent.builtin.pipeline.call import Call
from afferent.builtin.pipeline.request import GenerateRequest, Rendered
from afferent.errors import InvalidRequest
from afferent.media.body.cutter import MediaKeys
from afferent.media.body.received import ReceivedBody
from afferent.proxy.dialects import COUNT_TOKENS, MESSAGES


class _OutputConfig(Struct, forbid_unknown_fields=True):
    """Output settings; ``effort`` is for models with reasoning."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: forms.OutputFormat | None = None


class _Request(schema.ConversationRequest, frozen=True, kw_only=True):
    """Fields common to requests for an answer and for a token count."""

    max_tokens: schema.MaxTokens | None = None
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[Text] | None = None
    stop_sequences: Annotated[list[schema.Stop], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    output_config: _OutputConfig | None = None
    output_format: forms.OutputFormat | None = None
    tools: Raw | UnsetType = UNSET
    tool_choice: Any = None

    def form(self) -> forms.Form:
        """See `AnyRequest.form`."""
        config = self.output_config
        return forms.one_of(
            forms.of_format(None if config is None else config.format, "output_config.format"),
            forms.of_format(self.output_format, "output_format"),
            super().form(),
        )

    def generate(self, body: ReceivedBody, request_id: str) -> GenerateRequest:
        """Translate the request.

        Args:
            body: Body with the media that the messages refer to.

        Raises:
            InvalidRequest: A block is not allowed there, or parameters are mutually exclusive.
        """
        messages = read_messages(self.system, self.messages, body)
        if not messages:
            raise InvalidRequest("the messages have no content", param="messages")
        generate = GenerateRequest(
            request_id=request_id,
            messages=messages,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            stop=tuple(self.stop_sequences or ()),
        )
        is_begun = messages[-1].role == "assistant"
        generate = with_template(with_parameters(generate, self), self, continues=is_begun)
        return add_tools(generate, self.tools, self.tool_choice)


class MessagesRequest(_Request, frozen=True, kw_only=True):
    max_tokens: schema.MaxTokens  # an answer needs one


class CountRequest(_Request, frozen=True, kw_only=True):
    """Request to count the prompt's tokens; all other fields are ignored."""

    def generate(self, body: ReceivedBody, request_id: str) -> GenerateRequest:
        return structs.replace(super().generate(body, request_id), is_only_counted=True)


class _Anthropic(BuiltinApi[_Request]):
    """Common part of the APIs for an answer and for a token count."""

    example: Mapping[str, Any] = {
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "What is a star?"}],
    }
    media_keys = MediaKeys(urls=("url",), base64=("data",))

    def translate(self, request: _Request, body: ReceivedBody, request_id: str) -> Call:
        generate = request.generate(body, request_id)
        reply = AnthropicReply(request_id, request.model)
        return Call(generate, is_stream=bool(request.stream), reply=reply)


class AnthropicTokenCount(_Anthropic):
    """Number of a prompt's tokens; no answer is generated."""

    dialect = COUNT_TOKENS
    reader: schema.Reader[_Request] = schema.Reader(CountRequest, parameters.MESSAGES)


def _count(rendered: Rendered) -> Mapping[str, Any]:
    return count_body(len(rendered.token_ids))


class AnthropicMessages(_Anthropic):
    """Messages; see `afferent.builtin.apis.api.Api`."""

    dialect = MESSAGES
    reader: schema.Reader[_Request] = schema.Reader(MessagesRequest, parameters.MESSAGES)
    besides = (TokenCount(api=AnthropicTokenCount(), answer=_count),)
