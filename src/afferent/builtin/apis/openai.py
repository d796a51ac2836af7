"""Common part of OpenAI's APIs: parameters, and the formats of errors and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from afferent.builtin.apis.schema import ConversationRequest, Stop
from afferent.builtin.pipeline.request import ScoredToken, Usage
from afferent.items.request import Detail
from afferent.media.body.cutter import MediaKeys

MEDIA_KEYS = MediaKeys(
    urls=("url", "image_url", "video_url", "audio_url", "file_data"), base64=("data",)
)
"""For all of them: if a client mixes them up, the schema's error is shown, not one on the body's
size.
"""

ImageDetail = Detail | Literal["original"]
"""Detail of an image; ``original`` has no limit but the model's own, which ``auto`` has, too."""
Stops = Stop | Annotated[list[Stop], Meta(max_length=4)]


class StreamOptions(Struct):
    include_usage: bool | None = False


class OpenAIRequest(ConversationRequest, kw_only=True):
    """Fields common to chat completions and Responses."""

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stop: Stops | None = None


def detail_of(given: ImageDetail | None) -> Detail:
    return "auto" if given is None or given == "original" else given


def stops(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


def scored_token(text: str, logprob: float, top: Sequence[tuple[str, float]]) -> ScoredToken:
    """Encode the log-probabilities of a token.

    Args:
        text: Text of the token alone.
        top: The most likely alternatives.
    """
    likely = [_likely(other, value) for other, value in top]
    entry = {**_likely(text, logprob), "top_logprobs": likely}
    return ScoredToken(msgspec.json.encode(entry))


def _likely(text: str, logprob: float) -> dict[str, Any]:
    """Describe a token; ``bytes`` are unknown if it is a part of a character."""
    octets = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": octets}


def frame(value: object) -> bytes:
    """Encode an event without a name."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """Sum up the usage; the prompt counts once for any number of answers."""
    prompt = usages[0].prompt_tokens
    completion = sum(each.completion_tokens for each in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": usages[0].cached_tokens},
    }
