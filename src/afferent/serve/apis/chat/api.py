"""OpenAI chat completions: requests into our words, and answers into OpenAI's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from afferent.errors import AfferentError, InvalidRequest, Param
from afferent.ingest.raw import RawMedia
from afferent.serve.apis import openai, parameters, schema
from afferent.serve.apis.asking import with_parameters
from afferent.serve.apis.chat import schema as openai_schema
from afferent.serve.apis.chat.schema import ChatRequest
from afferent.serve.apis.tool_calls import ToolCalls
from afferent.serve.flow.call import Answer, Call, ReceivedBody, Reply
from afferent.serve.flow.request import (
    End,
    GenerateRequest,
    Logprobs,
    MediaPart,
    Message,
    Output,
    Part,
    Role,
    ScoredToken,
    TextDelta,
    TextPart,
    Usage,
)
from afferent.types import Modality

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_PARAMS = {Param.MESSAGES: "messages"}


class OpenAIChat:
    """See `afferent.serve.apis.api.Api`."""

    name = "openai_chat"
    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    request_type = ChatRequest
    media_keys = openai.MEDIA_KEYS
    key_header = openai.KEY_HEADER
    besides = ()

    def __init__(self) -> None:
        self._reader = schema.Reader(ChatRequest, parameters.CHAT)

    def parse(
        self, body: ReceivedBody, *, request_id: str, model: str, refuses_unknown: bool = False
    ) -> Call:
        chat, ignored = self._reader.read(body.json, served=model, refuses_unknown=refuses_unknown)
        media, calls = dict(body.media), ToolCalls()
        messages = [_message(i, each, media, calls) for i, each in enumerate(chat.messages)]
        generate = GenerateRequest(
            request_id=request_id,
            messages=tuple(messages),
            max_tokens=chat.max_completion_tokens or chat.max_tokens,
            temperature=chat.temperature,
            stop=chat.stops,
            n=chat.n or 1,
            logprobs=_wanted_logprobs(chat),
        )
        generate = with_parameters(generate, chat, effort=chat.reasoning_effort)
        schema.check_all_taken(media, "messages")
        return Call(generate, bool(chat.stream), _reply(chat, request_id), ignored=ignored)

    def error_body(self, error: AfferentError, request_id: str) -> Mapping[str, Any]:
        return openai.error_body(error, _PARAMS)


def _wanted_logprobs(chat: ChatRequest) -> Logprobs | None:
    if chat.logprobs:
        return Logprobs(chat.top_logprobs or 0, openai.scored_token)
    if chat.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs", param="top_logprobs")
    return None


def _message(
    index: int, message: openai_schema.ChatMessage, media: dict[str, RawMedia], calls: ToolCalls
) -> Message:
    where, role, content = f"messages[{index}]", _ROLES[message.role], message.content
    if isinstance(content, str):
        parts: list[Part] = [TextPart(content)]
    else:
        parts = [_part(part, media, where) for part in content or ()]
    if role not in ("user", "tool") and any(isinstance(part, MediaPart) for part in parts):
        raise InvalidRequest("media stand in messages of the user and of tools", param=where)
    if role == "assistant":
        _add_calls(calls, parts, message, where)
    if content is None and not parts:
        raise InvalidRequest("a message needs content", param=where)
    return Message(role, tuple(parts))


def _add_calls(
    calls: ToolCalls, turn: list[Part], message: openai_schema.ChatMessage, where: str
) -> None:
    """What the assistant asked of tools, written out; what has no name is no call."""
    asked = schema.read_part(
        openai_schema.tool_calls_decoder, message.tool_calls, f"{where}.tool_calls"
    )
    old = schema.read_part(
        openai_schema.function_call_decoder, message.function_call, f"{where}.function_call"
    )
    for call in [*(each.function or each.custom for each in asked or ()), old]:
        if isinstance(call, openai_schema.AnyCall) and call.name is not None:
            calls.write(turn, call.name, call.arguments, where)


def _part(part: openai_schema.Content, media: dict[str, RawMedia], where: str) -> Part:
    """``media`` loses what stands here."""
    match part:
        case openai_schema.TextContent(text) | openai_schema.RefusalContent(text):
            return TextPart(text)
        case openai_schema.ImageContent(image, uuid):
            url = image.url if image else None
            detail = image.detail if image and image.detail else "auto"
            found = MediaPart(Modality.IMAGE, _source(url, media), detail, uuid)
        case openai_schema.VideoContent(video, uuid):
            url = video.url if video else None
            found = MediaPart(Modality.VIDEO, _source(url, media), uuid=uuid)
        case openai_schema.AudioUrlContent(audio_url, uuid):
            url = audio_url.url if audio_url else None
            found = MediaPart(Modality.AUDIO, _source(url, media), uuid=uuid)
        case openai_schema.AudioContent(audio, uuid):
            found = MediaPart(Modality.AUDIO, _audio_source(audio, media), uuid=uuid)
    if found.source is None and uuid is None:
        raise InvalidRequest(f"an item of {where} has neither data nor a uuid", param=where)
    return found


def _source(url: str | None, media: dict[str, RawMedia]) -> str | RawMedia | None:
    return None if url is None else media.pop(url, url)


def _audio_source(
    audio: openai_schema.InputAudio | None, media: dict[str, RawMedia]
) -> str | RawMedia | None:
    if audio is None or audio.data is None:
        return None
    # What is so short that it was not cut out of the body goes the way of a URL.
    return media.pop(audio.data, f"data:audio/{audio.format};base64,{audio.data}")


def _reply(chat: ChatRequest, request_id: str) -> Reply:
    with_usage = chat.stream_options is not None and bool(chat.stream_options.include_usage)
    return _ChatReply(chat.model, request_id, chat.n or 1, with_usage=with_usage)


class _ChatReply:
    """See `afferent.serve.apis.api.Reply`."""

    def __init__(self, model: str, request_id: str, num_answers: int, *, with_usage: bool) -> None:
        self._num_answers, self._with_usage = num_answers, with_usage
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._ends: list[End] = []

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": answer.text, "refusal": None},
                "logprobs": _logprobs(answer.logprobs),
                "finish_reason": answer.end.reason,
                "stop_reason": answer.end.stop,
            }
            for index, answer in enumerate(answers)
        ]
        usage = _usage([answer.end.usage for answer in answers])
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}

    def begin(self) -> list[bytes]:
        first = {"role": "assistant", "content": ""}
        return [self._chunk(index, first) for index in range(self._num_answers)]

    def output(self, output: Output) -> list[bytes]:
        match output:
            case TextDelta(text, index, logprobs):
                return [self._chunk(index, {"content": text}, logprobs=_logprobs(logprobs))]
            case End():
                self._ends.append(output)
                return [self._chunk(output.index, {}, end=output)]
        return []

    def finish(self) -> list[bytes]:
        frames = [b"data: [DONE]\n\n"]
        if self._with_usage:
            usage = _usage([end.usage for end in self._ends])
            frames.insert(0, self._event({"choices": [], "usage": usage}))
        return frames

    def fail(self, error: AfferentError) -> list[bytes]:
        return [_frame(openai.error_body(error, _PARAMS))]

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        end: End | None = None,
    ) -> bytes:
        reason = {} if end is None else {"stop_reason": end.stop}
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None if end is None else end.reason,
            **reason,
        }
        usage = {"usage": None} if self._with_usage else {}
        return self._event({"choices": [choice], **usage})

    def _event(self, body: dict[str, Any]) -> bytes:
        return _frame({**self._head, "object": "chat.completion.chunk", **body})


def _frame(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _usage(usages: Sequence[Usage]) -> dict[str, int]:
    """The prompt counts once, however many answers there are."""
    prompt = usages[0].prompt_tokens
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _logprobs(tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
    if not tokens:
        return None
    return {"content": tokens, "refusal": None}
