"""Trace of a request: the time of each stage, its process, and its copied bytes.

A stage of this process is declared by its first recording. Stages of other processes, whose spans
come with their answers, are declared by a module that both import; otherwise they count as
``other``.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from afferent.types import Span, span_since

if TYPE_CHECKING:
    from afferent.telemetry.spans import RequestSpan

STAGES: set[str] = set()
"""Values of the label ``stage``."""


def declare_stages(*stages: str) -> None:
    """Declare stages that other processes measure for requests of this one."""
    STAGES.update(stages)


@dataclass(slots=True)
class Trace:
    """Spans of one request, of every process that worked on it."""

    request_id: str
    what: str
    start_ns: int = field(default_factory=time.monotonic_ns)
    spans: list[Span] = field(default_factory=list)
    items: list[str] = field(default_factory=list)
    media: str = "unread"
    """Modality of the request's media: one of `afferent.proxy.counting.MEDIA`."""
    where: str = "body"
    """Current stage of the request: one of `afferent.proxy.counting.PLACES`."""
    num_prompt_tokens: int = 0
    num_answer_tokens: int = 0
    digests: list[str] = field(default_factory=list)
    """Keys of its items, each once."""
    root: RequestSpan | None = None
    """Span of the request in an external tracer."""
    tenant: str = ""
    client_request_id: str = ""
    """The client's own id of the request; empty if it sent none."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Numbers of its media items by outcome, such as ``hit``."""
    reduced_to: int = 0
    """Limit of the answer's tokens, if the request asked for more than the model has room for."""
    max_requests: int = 0
    """Limit of its tenant's running requests; 0 without one."""
    num_requests_left: int = 0
    """Number of requests that this limit admitted beside it, when it was admitted or refused."""

    def stage(self, start_ns: int, name: str, *, copied_nbytes: int = 0, note: str = "") -> None:
        """Record a stage of this process, from ``start_ns`` to now; ``name`` is a fixed word."""
        STAGES.add(name)
        self.spans.append(
            span_since(start_ns, "frontend", name, copied_nbytes=copied_nbytes, note=note)
        )

    @contextlib.contextmanager
    def at(self, where: str) -> Iterator[None]:
        """Set ``where`` while the block runs; it stays if the block fails."""
        before, self.where = self.where, where
        yield
        self.where = before

    def add(self, spans: Sequence[Span]) -> None:
        self.spans += spans
