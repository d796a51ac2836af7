"""OpenAI Responses: schema of requests, and their translation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, structs

from afferent.builtin.apis import forms, openai, parameters, schema
from afferent.builtin.apis.api import TokenCount
from afferent.builtin.apis.asking import BuiltinApi, with_parameters, with_template
from afferent.builtin.apis.openai import OpenAIRequest
from afferent.builtin.apis.responses.events import ResponsesReply
from afferent.builtin.apis.responses.input import InputItem, read_input
from afferent.builtin.apis.responses.kept import LOOKUPS
from afferent.builtin.apis.responses.tools import name_of, read_tools
from afferent.builtin.apis.tools import read_choice, with_tools
from afferent.builtin.pipeline.call import Call
from afferent.builtin.pipeline.named_conversations import joined
from afferent.builtin.pipeline.request import GenerateRequest, Logprobs, Message, Rendered, TextPart
from afferent.errors import InvalidRequest
from afferent.media.body.received import ReceivedBody
from afferent.proxy.dialects import INPUT_TOKENS, RESPONSES

_FORMAT = "text.format"
_LOGPROBS = "message.output_text.logprobs"

_Include = Literal[
    "message.output_text.logprobs",
    # An answer contains none of these.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
]


class _Reasoning(Struct):
    effort: Annotated[str, Meta(max_length=64)] | None = None


class _Text(Struct, forbid_unknown_fields=True):
    """Text settings; ``format`` is also repeated by the answer."""

    format: Raw | UnsetType = UNSET
    verbosity: Literal["low", "medium", "high"] | None = None


_ConversationId = Annotated[str, Meta(max_length=64)]


class _Conversation(Struct):
    id: _ConversationId


_format_decoder = msgspec.json.Decoder(forms.OutputFormat | None)


class ResponsesRequest(OpenAIRequest, frozen=True, kw_only=True):
    """Request; a parameter that is not supported is only accepted if it changes nothing."""

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=64)] | None = None
    conversation: _ConversationId | _Conversation | None = None
    store: bool | None = True
    max_output_tokens: schema.MaxTokens | None = None
    include: Annotated[list[_Include], Meta(max_length=16)] | None = None
    metadata: schema.Metadata | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    # Repeated by the answer.
    max_tool_calls: Any = None
    parallel_tool_calls: bool | None = True
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    tool_choice: Any = None
    # Parsed only if the choice is not "none": with it, they mean nothing.
    tools: Raw | UnsetType = UNSET
    truncation: Any = None
    user: Any = None

    def form(self) -> forms.Form:
        """See `AnyRequest.form`."""
        given = UNSET if self.text is None else self.text.format
        wanted = schema.read_part(_format_decoder, given, _FORMAT)
        return forms.one_of(forms.of_format(wanted, _FORMAT), super().form())


class _Responses(BuiltinApi[ResponsesRequest]):
    """Common part of the APIs for an answer and for a token count."""

    reader = schema.Reader(ResponsesRequest, parameters.RESPONSES)
    media_keys = openai.MEDIA_KEYS
    example: Mapping[str, Any] = {"input": "What is a star?"}

    def translate(self, request: ResponsesRequest, body: ReceivedBody, request_id: str) -> Call:
        given = [] if request.input is None else request.input
        is_continued = request.previous_response_id is not None or request.conversation is not None
        if given == [] and not is_continued:
            raise InvalidRequest(
                "input is missing; without it, previous_response_id or conversation is needed",
                param="input",
            )
        items = read_input(given, body)
        generate = GenerateRequest(
            request_id=request_id,
            messages=joined(item.message for item in items),
            max_tokens=request.max_output_tokens,
            temperature=request.temperature,
            stop=openai.stops(request.stop),
            logprobs=_wanted_logprobs(request),
        )
        effort = request.reasoning.effort if request.reasoning is not None else None
        instructions = request.instructions
        generate = with_template(with_parameters(generate, request), request, effort=effort)
        conversation_id = _conversation_id(request)
        if conversation_id is not None:
            _check_conversation(request, generate)
        choice = read_choice(request.tool_choice, name_of)
        tools = read_tools(request.tools) if choice.mode != "none" else []
        is_parallel = request.parallel_tool_calls is not False
        generate = with_tools(generate, tools, choice, is_parallel=is_parallel)
        reply = ResponsesReply(request_id, _echo(request), has_tools=bool(tools))
        return Call(
            generate,
            is_stream=bool(request.stream),
            reply=reply,
            instructions=Message("system", (TextPart(instructions),)) if instructions else None,
            previous_id=request.previous_response_id,
            conversation_id=conversation_id,
            said=tuple(items) if conversation_id is not None else (),
            is_kept=request.store is not False,
        )


class OpenAIInputTokens(_Responses):
    """Number of a prompt's tokens; no answer is generated."""

    dialect = INPUT_TOKENS

    def translate(self, request: ResponsesRequest, body: ReceivedBody, request_id: str) -> Call:
        call = super().translate(request, body, request_id)
        return replace(call, generate=structs.replace(call.generate, is_only_counted=True))


def _count(rendered: Rendered) -> Mapping[str, Any]:
    return {"object": "response.input_tokens", "input_tokens": len(rendered.token_ids)}


class OpenAIResponses(_Responses):
    """Responses; see `afferent.builtin.apis.api.Api`."""

    dialect = RESPONSES
    besides = (*LOOKUPS, TokenCount(api=OpenAIInputTokens(), answer=_count))


def _conversation_id(request: ResponsesRequest) -> str | None:
    given = request.conversation
    return given.id if isinstance(given, _Conversation) else given


def _check_conversation(request: ResponsesRequest, generate: GenerateRequest) -> None:
    """Check that a request that continues a conversation by its id does nothing else.

    Raises:
        InvalidRequest: It also continues an answer, or a message of its own.
    """
    if request.previous_response_id is not None:
        raise InvalidRequest(
            "conversation and previous_response_id exclude each other", param="conversation"
        )
    if generate.template.continues_last:
        raise InvalidRequest(
            "conversation and continue_final_message exclude each other", param="conversation"
        )


def _wanted_logprobs(request: ResponsesRequest) -> Logprobs | None:
    if request.top_logprobs is None and _LOGPROBS not in (request.include or []):
        return None
    return Logprobs(request.top_logprobs or 0, openai.scored_token)


def _format(request: ResponsesRequest) -> Any:
    given = UNSET if request.text is None else request.text.format
    return {"type": "text"} if given is UNSET or bytes(given) == b"null" else given


def _echo(request: ResponsesRequest) -> dict[str, Any]:
    """Return the fields that the answer repeats from the request, with defaults."""
    conversation_id = _conversation_id(request)
    return {
        "background": False,
        "conversation": None if conversation_id is None else {"id": conversation_id},
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": request.model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {"format": _format(request)},
        "tool_choice": request.tool_choice or "auto",
        "tools": [] if request.tools is UNSET else request.tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
        "user": request.user,
    }
