"""What goes from an API to the way of a request, and back: a body, a call, its reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from afferent.errors import AfferentError
from afferent.ingest.cutter import CutMedia
from afferent.ingest.raw import RawMedia
from afferent.serve.flow.request import End, GenerateRequest, Message, Output, ScoredToken

ModelNames = str | tuple[str, ...]
"""The model's name in requests; of several, the first is the one in answers, as vLLM has it."""


@dataclass(frozen=True, slots=True)
class ReceivedBody:
    """``media`` are what was cut out, by the marker that stands in the JSON in their place.

    ``cut`` is what was seen of them, by the same markers.
    """

    json: bytes
    media: dict[str, RawMedia]
    nbytes: int
    cut: Mapping[str, CutMedia] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """One of a request's ``n`` answers, complete."""

    text: str
    end: End
    logprobs: tuple[ScoredToken, ...] = ()


class Reply(Protocol):
    """The answer to one request, in the form of its API. Frames are whole server-sent events."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer as JSON."""

    def begin(self) -> list[bytes]:
        """The frames before the first output."""

    def output(self, output: Output) -> list[bytes]:
        """The frames for a piece of an answer, or for its end."""

    def finish(self) -> list[bytes]:
        """The frames after the ends of all answers."""

    def fail(self, error: AfferentError) -> list[bytes]:
        """The frames that end a stream which went wrong."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request that an API has understood."""

    generate: GenerateRequest
    is_stream: bool
    reply: Reply
    instructions: Message | None = None
    """Stands before the whole conversation, and is not kept with it."""
    previous_id: str | None = None
    """The conversation goes on from the answer of this id, whose messages come first."""
    is_kept: bool = False
    """The conversation can be gone on with from this answer."""
    ignored: tuple[str, ...] = ()
    """Parameters that nobody knows."""
