"""What OpenAI's APIs have in common: parameters, the form of errors, and of log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from afferent.errors import AfferentError, MediaNotCached, Param
from afferent.ingest.cutter import MediaKeys
from afferent.serve.apis.api import KeyHeader
from afferent.serve.apis.schema import ConversationRequest, Stop
from afferent.serve.apis.statuses import message_of, param_of, status_of
from afferent.serve.flow.request import ScoredToken, Usage

MEDIA_KEYS = MediaKeys(
    urls=("url", "image_url", "video_url", "audio_url", "file_data"), base64=("data",)
)
"""Of both APIs: where a client takes one for the other, the schema says what is wrong, not how long
the body is.
"""
KEY_HEADER = KeyHeader("authorization", "bearer ")


Stops = Stop | Annotated[list[Stop], Meta(max_length=4)]


class StreamOptions(Struct):
    include_usage: bool | None = False


class OpenAIRequest(ConversationRequest, kw_only=True):
    """Of chat completions and Responses."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stop: Stops | None = None


def stops(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


def error_body(error: AfferentError, params: Mapping[Param, str] | None = None) -> dict[str, Any]:
    """The error as these APIs write it. A defect of ours shows no detail.

    Args:
        params: What the API calls its parameters.
    """
    body: dict[str, Any] = {
        "message": message_of(error),
        "type": "invalid_request_error" if status_of(error) < 500 else "server_error",
        "param": param_of(error, params or {}),
        "code": error.code,
    }
    if isinstance(error, MediaNotCached):
        body["uuids"] = error.uuids
    return {"error": body}


def scored_token(text: str, logprob: float, top: Sequence[tuple[str, float]]) -> ScoredToken:
    """
    Args:
        text: Of the token alone.
        top: The likeliest instead.
    """
    likely = [_likely(other, value) for other, value in top]
    entry = {**_likely(text, logprob), "top_logprobs": likely}
    return ScoredToken(msgspec.json.encode(entry))


def _likely(text: str, logprob: float) -> dict[str, Any]:
    """``bytes`` are unknown of a token that is a part of a character."""
    octets = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": octets}


def frame(value: object) -> bytes:
    """An event without a name."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def usage(usages: Sequence[Usage]) -> dict[str, int]:
    """The prompt counts once, however many answers there are."""
    prompt = usages[0].prompt_tokens
    completion = sum(each.completion_tokens for each in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
