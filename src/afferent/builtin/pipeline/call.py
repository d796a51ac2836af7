"""Types between an API and the pipeline: the body, the call and its reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from afferent.builtin.pipeline.named_conversations import NewItem
from afferent.builtin.pipeline.request import (
    CallPart,
    End,
    GenerateRequest,
    Message,
    Output,
    ScoredToken,
)
from afferent.errors import AfferentError

ModelNames = str | tuple[str, ...]
"""Name or names of the model in requests; the first is the one in answers, as in vLLM."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One of a request's ``n`` answers, complete."""

    text: str
    end: End
    logprobs: tuple[ScoredToken, ...] = ()
    calls: tuple[CallPart, ...] = ()


class Reply(Protocol):
    """Answer to one request, in the format of its API. Frames are whole server-sent events."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the answer as JSON."""

    def begin(self) -> list[bytes]:
        """Return the frames before the first output."""

    def output(self, output: Output) -> list[bytes]:
        """Return the frames for a piece of an answer, or for its end."""

    def finish(self) -> list[bytes]:
        """Return the frames after the ends of all answers."""

    def fail(self, error: AfferentError) -> list[bytes]:
        """Return the frames that end a failed stream."""


@dataclass(frozen=True, slots=True)
class Call:
    """Request as parsed by an API."""

    generate: GenerateRequest
    is_stream: bool
    reply: Reply
    instructions: Message | None = None
    """Precedes the whole conversation, and is not stored with it."""
    previous_id: str | None = None
    """Id of the answer that the conversation continues; its messages come first."""
    conversation_id: str | None = None
    """Id of the conversation that it continues; its messages come first."""
    said: tuple[NewItem, ...] = ()
    """Items of the messages, to be appended to that conversation."""
    is_kept: bool = False
    """Whether the conversation is stored, to be continued from this answer."""
    ignored: tuple[str, ...] = ()
    """Names of unknown parameters."""
