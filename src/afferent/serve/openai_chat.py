"""OpenAI chat completions: the request's schema, and the answer's.

Unknown keys are refused, not dropped: a misspelt ``max_token`` must not become a long answer.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct

from afferent.errors import InvalidRequest, ModelNotFound, UnsupportedParameter
from afferent.ingest.raw import RawMedia
from afferent.serve.body import ReceivedBody
from afferent.serve.request import (
    End,
    GenerateRequest,
    MediaPart,
    Message,
    Part,
    Rendered,
    Role,
    TextPart,
)
from afferent.types import Handle, Modality


class _Text(Struct, tag="text", forbid_unknown_fields=True):
    text: str


class _ImageUrl(Struct, forbid_unknown_fields=True):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class _Image(Struct, tag="image_url", forbid_unknown_fields=True):
    image_url: _ImageUrl


class _MediaUrl(Struct, forbid_unknown_fields=True):
    url: str


class _Video(Struct, tag="video_url", forbid_unknown_fields=True):
    video_url: _MediaUrl


class _AudioUrl(Struct, tag="audio_url", forbid_unknown_fields=True):
    audio_url: _MediaUrl


class _InputAudio(Struct, forbid_unknown_fields=True):
    """``format`` is a hint: the bytes decide."""

    data: str
    format: Annotated[str, Meta(pattern="^[a-z0-9]{1,8}$")]


class _Audio(Struct, tag="input_audio", forbid_unknown_fields=True):
    input_audio: _InputAudio


_Part = _Text | _Image | _Video | _AudioUrl | _Audio


class _Message(Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[_Part], Meta(max_length=4096)] | None = None
    name: str | None = None
    refusal: str | None = None
    # Not looked into: a slice of the body, however much is nested in it.
    tool_calls: msgspec.Raw = msgspec.Raw()
    tool_call_id: msgspec.Raw = msgspec.Raw()
    function_call: msgspec.Raw = msgspec.Raw()
    annotations: msgspec.Raw = msgspec.Raw()
    audio: msgspec.Raw = msgspec.Raw()


class _StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False


_MaxTokens = Annotated[int, Meta(ge=1, le=2**20)]
_Stop = Annotated[str, Meta(min_length=1, max_length=256)]

# Parameters that change nothing with these values. Any other value is refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
}


class ChatRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(max_length=256)]
    messages: Annotated[list[_Message], Meta(min_length=1, max_length=4096)]
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    max_tokens: _MaxTokens | None = None
    max_completion_tokens: _MaxTokens | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=4)] | None = None
    # Accepted; they do not change the answer.
    user: str | None = None
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    # Accepted with a neutral value only.
    n: Any = UNSET
    logprobs: Any = UNSET
    presence_penalty: Any = UNSET
    frequency_penalty: Any = UNSET
    logit_bias: Any = UNSET
    response_format: Any = UNSET
    tools: Any = UNSET
    tool_choice: Any = UNSET
    modalities: Any = UNSET
    store: Any = UNSET


_decoder = msgspec.json.Decoder(ChatRequest)


def parse(
    body: ReceivedBody, *, request_id: str, model: str
) -> tuple[ChatRequest, GenerateRequest]:
    """The request as sent, and in our own words.

    Raises:
        InvalidRequest: The body is not JSON, or not of this schema; the message says where.
        ModelNotFound: Another model is asked for.
        UnsupportedParameter: A parameter that is known, and not served.
    """
    try:
        chat = _decoder.decode(body.json)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("the body is not valid JSON") from error
    if chat.model != model:
        raise ModelNotFound(f"the model {chat.model!r} is not served here", param="model")
    for name, neutral in _NEUTRAL.items():
        value = getattr(chat, name)
        if value is not UNSET and value is not None and value not in neutral:
            raise UnsupportedParameter(f"{name} is not supported", param=name)
    stop = (chat.stop,) if isinstance(chat.stop, str) else tuple(chat.stop or ())
    media = dict(body.media)
    generate = GenerateRequest(
        request_id=request_id,
        messages=tuple(_message(i, message, media) for i, message in enumerate(chat.messages)),
        max_tokens=chat.max_completion_tokens or chat.max_tokens,
        temperature=chat.temperature,
        top_p=chat.top_p,
        seed=chat.seed,
        stop=stop,
    )
    if media:
        raise InvalidRequest("there are media where the API expects none", param="messages")
    return chat, generate


_NOTHING = (b"", b"null", b"[]")

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
}


def _message(index: int, message: _Message, media: dict[str, RawMedia]) -> Message:
    where = f"messages[{index}]"
    if message.role not in _ROLES or bytes(message.tool_calls) not in _NOTHING:
        raise UnsupportedParameter("tools are not supported", param=where)
    content = message.content
    if content is None:
        raise InvalidRequest("a message needs content", param=where)
    if isinstance(content, str):
        return Message(_ROLES[message.role], (TextPart(content),))
    parts = tuple(_part(part, media) for part in content)
    if message.role != "user" and any(isinstance(part, MediaPart) for part in parts):
        raise InvalidRequest("media stand in messages of the user", param=where)
    return Message(_ROLES[message.role], parts)


def _part(part: _Part, media: dict[str, RawMedia]) -> Part:
    """``media`` loses what stands here."""
    match part:
        case _Text(text):
            return TextPart(text)
        case _Image(image):
            return MediaPart(Modality.IMAGE, media.pop(image.url, image.url))
        case _Video(video):
            return MediaPart(Modality.VIDEO, media.pop(video.url, video.url))
        case _AudioUrl(audio_url):
            return MediaPart(Modality.AUDIO, media.pop(audio_url.url, audio_url.url))
        case _Audio(audio):
            url = f"data:audio/{audio.format};base64,{audio.data}"  # so short that it was not cut
            return MediaPart(Modality.AUDIO, media.pop(audio.data, url))


def rendered(chat: ChatRequest, rendered: Rendered) -> dict[str, Any]:
    """The answer to a request to render; not an API of OpenAI's."""
    items = []
    for item in rendered.items:
        place = {"offset": item.placeholder.offset, "length": item.placeholder.length}
        entry: dict[str, Any] = {"modality": item.modality, "key": item.key, **place}
        if item.features is not None:
            entry["features"] = {
                name: getattr(item.features, name) for name in Handle.__struct_fields__
            }
        items.append(entry)
    return {
        "object": "chat.completion.render",
        "model": chat.model,
        "token_ids": rendered.token_ids,
        "items": items,
    }


def completion(chat: ChatRequest, request_id: str, text: str, end: End) -> dict[str, Any]:
    """The whole answer."""
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": chat.model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": end.reason,
            }
        ],
        "usage": _usage(end),
    }


class Chunks:
    """The answer as a stream of ``chat.completion.chunk`` objects."""

    def __init__(self, chat: ChatRequest, request_id: str) -> None:
        self._with_usage = chat.stream_options is not None and chat.stream_options.include_usage
        self._head = {
            "id": request_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": chat.model,
        }

    def first(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def text(self, text: str) -> dict[str, Any]:
        return self._chunk({"content": text}, None)

    def last(self, end: End) -> list[dict[str, Any]]:
        chunks = [self._chunk({}, end.reason)]
        if self._with_usage:
            chunks.append({**self._head, "choices": [], "usage": _usage(end)})
        return chunks

    def _chunk(self, delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self._with_usage else {}
        return {**self._head, "choices": [choice], **usage}


def _usage(end: End) -> dict[str, int]:
    return {
        "prompt_tokens": end.usage.prompt_tokens,
        "completion_tokens": end.usage.completion_tokens,
        "total_tokens": end.usage.prompt_tokens + end.usage.completion_tokens,
    }
