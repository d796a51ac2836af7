"""A request in our own words, whichever API it came by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import Struct

from afferent.ingest.raw import RawMedia
from afferent.quota.shares import NAMELESS, Share
from afferent.types import Modality, Placeholder, Sampling

Role = Literal["system", "user", "assistant", "tool"]
Detail = Literal["auto", "low", "high"]


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class SeenMedia:
    """An item whose features were made before, known by the digest of its encoded bytes."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image, audio clip or video: as it came in the body, or by URL."""

    modality: Modality
    source: str | RawMedia | SeenMedia | None
    """``None``: an item seen before, known by its ``uuid``."""
    detail: Detail = "auto"
    uuid: str | None = None
    max_pixels: int = 0
    """Most pixels that are made of an image, if that is less than the model's own; 0: not said."""


Part = TextPart | MediaPart


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    parts: tuple[Part, ...]


ScoredToken = msgspec.Raw
"""A token of the answer, its log-probability, and the likeliest instead, as an API writes them.

It is JSON from the start: to write all those of a long answer at its end takes a second.
"""

WriteScored = Callable[[str, float, Sequence[tuple[str, float]]], ScoredToken]
"""Write a token's text, its log-probability, and the likeliest instead."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities are asked for: those of ``num_top`` other tokens, too, to be written so."""

    num_top: int
    write: WriteScored


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """``max_tokens`` is ``None`` for as many as the model has room for."""

    request_id: str
    messages: tuple[Message, ...]
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    """How many answers."""
    logprobs: Logprobs | None = None
    share: Share = NAMELESS
    """Whose request it is."""

    @property
    def tenant(self) -> str:
        """What one tenant has cached, no other can hit."""
        return self.share.tenant

    @property
    def media(self) -> list[MediaPart]:
        """All items of all messages, in order."""
        return [p for m in self.messages for p in m.parts if isinstance(p, MediaPart)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What the model's own generation config says where the request says nothing."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def apply(self, request: GenerateRequest, *, max_tokens: int) -> Sampling:
        temperature = request.temperature if request.temperature is not None else self.temperature
        return Sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=request.top_p if request.top_p is not None else self.top_p,
            top_k=request.top_k if request.top_k is not None else self.top_k,
            seed=request.seed,
            num_logprobs=request.logprobs.num_top if request.logprobs is not None else None,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


class RenderedItem(Struct, frozen=True):
    """Where an item stands in a prompt, and what it is.

    ``key`` is the features' content key in hexadecimal: who may look into the store finds them by
    it. ``features_nbytes`` is how large they are, if they were to be made.
    """

    modality: Modality
    key: str
    placeholder: Placeholder
    features_nbytes: int | None = None


class Rendered(Struct, frozen=True):
    """A prompt as the engine gets it."""

    token_ids: list[int]
    items: list[RenderedItem]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of an answer, and its tokens if log-probabilities were asked for."""

    text: str
    index: int = 0
    """Of which of the ``n`` answers."""
    logprobs: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """``stop`` is the stop string that was met, if one was."""

    reason: Literal["stop", "length"]
    usage: Usage
    index: int = 0
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """Which media the prompt holds, in order, and its length; said before the first text."""

    digests: tuple[bytes, ...]
    num_prompt_tokens: int


Output = PromptInfo | TextDelta | End


@dataclass(slots=True)
class StopMatcher:
    """Ends the text before the first stop string; holds back what may be the start of one. Pure."""

    stops: tuple[str, ...]
    met: str | None = None
    """The stop string that ended the text."""
    _held: str = field(default="")

    def feed(self, text: str) -> str:
        """What can be sent for certain, now that ``text`` has come."""
        if self.met is not None:
            return ""
        pending = self._held + text
        # The stop string that is complete first wins, so that it does not matter how text is cut.
        found = [(at + len(stop), at) for stop in self.stops if (at := pending.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self.met, self._held = pending[start:end], ""
            return pending[:start]
        longest = max((len(stop) for stop in self.stops), default=1)
        for length in range(min(longest - 1, len(pending)), 0, -1):
            if any(stop.startswith(pending[-length:]) for stop in self.stops):
                self._held = pending[-length:]
                return pending[:-length]
        self._held = ""
        return pending

    def flush(self) -> str:
        """The text that was held back, once no more comes."""
        held, self._held = self._held, ""
        return held
