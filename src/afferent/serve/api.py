"""What an API is to the server: a translation of a request into our words, and of its answer back.

Each API has one module that offers an `Api`. None of them does I/O: bodies are read, requests run
and answers sent in one place for all (`afferent.serve.app`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import Struct

from afferent.errors import AfferentError
from afferent.serve.body import ReceivedBody
from afferent.serve.request import End, GenerateRequest, Message, Output, ScoredToken


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


class Api(Protocol):
    """One way of asking for an answer."""

    @property
    def name(self) -> str:
        """For metrics: a word such as ``openai_chat``."""

    @property
    def id_prefix(self) -> str:
        """What the ids of its requests begin with, such as ``chatcmpl-``."""

    @property
    def request_type(self) -> type[Struct]:
        """The schema of its bodies, for the OpenAPI document."""

    def parse(self, body: ReceivedBody, *, request_id: str, model: str) -> Call:
        """Understand a request for the model that is served under the name ``model``.

        Raises:
            InvalidRequest: The body is not JSON, or not of the API's schema; it says where.
            ModelNotFound: Another model is asked for.
            UnsupportedParameter: A parameter that is known, and not served.
        """

    def error_body(self, error: AfferentError, request_id: str) -> Mapping[str, Any]:
        """The error as this API writes it. A defect of ours shows no detail."""
