"""A request in our own words, whichever API it came by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from afferent.ingest.raw import RawMedia
from afferent.types import Handle, Modality, Placeholder, Sampling

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class MediaPart:
    """An image, audio clip or video: as it came in the body, or by URL."""

    modality: Modality
    source: str | RawMedia


Part = TextPart | MediaPart


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """``max_tokens`` is ``None`` for as many as the model has room for."""

    request_id: str
    messages: tuple[Message, ...]
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

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
            top_k=self.top_k,
            seed=request.seed,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


class RenderedItem(Struct, frozen=True):
    """Where an item stands in a prompt, and what it is.

    ``key`` is the features' content key in hexadecimal. ``features`` is where they are, if they
    were asked for; nobody holds them, so that they may be evicted.
    """

    modality: Modality
    key: str
    placeholder: Placeholder
    features: Handle | None = None


class Rendered(Struct, frozen=True):
    """A prompt as the engine gets it."""

    token_ids: list[int]
    items: list[RenderedItem]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class End:
    reason: Literal["stop", "length"]
    usage: Usage


Output = TextDelta | End


@dataclass(slots=True)
class StopMatcher:
    """Ends the text before the first stop string; holds back what may be the start of one. Pure."""

    stops: tuple[str, ...]
    stopped: bool = False
    _held: str = field(default="")

    def feed(self, text: str) -> str:
        """What can be sent for certain, now that ``text`` has come."""
        if self.stopped:
            return ""
        pending = self._held + text
        # The stop string that is complete first wins, so that it does not matter how text is cut.
        found = [(at + len(stop), at) for stop in self.stops if (at := pending.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return pending[: min(found)[1]]
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
