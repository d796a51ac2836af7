"""The trace of a request: what each stage took, in which process, and what it copied.

A stage of this process is known by being recorded. Those of other processes, whose spans come with
their answers, are declared by a module that both import, or they are counted as ``other``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from afferent.types import Span, span_since

STAGES: set[str] = set()
"""The words of the label ``stage``."""


def declare_stages(*stages: str) -> None:
    """Stages that other processes measure for requests of this one."""
    STAGES.update(stages)


@dataclass(slots=True)
class Trace:
    """Spans of one request, of every process that worked on it."""

    request_id: str
    what: str
    start_ns: int = field(default_factory=time.monotonic_ns)
    spans: list[Span] = field(default_factory=list)
    items: list[str] = field(default_factory=list)
    media: str = "unknown"
    """The modality of the request's media: one of `afferent.serve.flow.counting.MEDIA`."""
    where: str = "body"
    """Where the request is: one of `afferent.serve.flow.counting.PLACES`."""

    def stage(self, start_ns: int, name: str, *, copied_nbytes: int = 0, note: str = "") -> None:
        """Record a stage of this process, from ``start_ns`` to now; ``name`` is a word of ours."""
        STAGES.add(name)
        self.spans.append(
            span_since(start_ns, "frontend", name, copied_nbytes=copied_nbytes, note=note)
        )

    @contextlib.contextmanager
    def at(self, where: str) -> Iterator[None]:
        """The request is elsewhere for a while, or for good if it fails there."""
        before, self.where = self.where, where
        yield
        self.where = before

    def add(self, spans: Sequence[Span]) -> None:
        self.spans += spans
