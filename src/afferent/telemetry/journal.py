"""Which requests this process answers, and which it has answered lately, with their stages.

Nothing is written until somebody asks: a request that runs is the `Trace` that it has anyway, and
one that has ended stays until so many others have. So it costs a request no more than two entries.
"""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from afferent.telemetry.trace import Trace
from afferent.types import Span

KEPT = 24
"""Requests that have ended, and of those that run how many are told."""
_MAX_WHAT = 120
MAX_SPANS = 48
"""Of a request, the longest: one of a hundred images has hundreds."""


class RequestReport(Struct, frozen=True, forbid_unknown_fields=True):
    """A request, as its trace is now.

    Attributes:
        what: Method and path.
        where: How far it has come: one of `afferent.serve.flow.counting.PLACES`.
        outcome: Empty while it runs; then ``ok``, ``client_gone``, or the code of an error.
        start_ns: By `time.monotonic_ns`, as `end_ns`, which is 0 while it runs.
        items: How many of each kind, and what became of them.
        spans: In the order in which they began.
        num_left_out: Shorter spans, which are not told.
    """

    request_id: str
    what: str
    tenant: str
    media: str
    where: str
    outcome: str
    start_ns: int
    end_ns: int
    items: list[str]
    num_prompt_tokens: int
    num_answer_tokens: int
    spans: list[Span]
    num_left_out: int = 0

    @classmethod
    def of(cls, trace: Trace, *, outcome: str = "", end_ns: int = 0) -> RequestReport:
        return cls(
            request_id=trace.request_id,
            what=trace.what[:_MAX_WHAT],
            tenant=trace.tenant,
            media=trace.media,
            where=trace.where,
            outcome=outcome,
            start_ns=trace.start_ns,
            end_ns=end_ns,
            items=list(trace.items),
            num_prompt_tokens=trace.num_prompt_tokens,
            num_answer_tokens=trace.num_answer_tokens,
            spans=_longest(trace.spans),
            num_left_out=max(len(trace.spans) - MAX_SPANS, 0),
        )


class Journal:
    """Of one process."""

    def __init__(self) -> None:
        self._running: dict[str, Trace] = {}
        self._ended: deque[RequestReport] = deque(maxlen=KEPT)

    def begin(self, trace: Trace) -> None:
        self._running[trace.request_id] = trace

    def end(self, trace: Trace, outcome: str) -> None:
        """The first end counts."""
        if self._running.pop(trace.request_id, None) is not None:
            end_ns = time.monotonic_ns()
            self._ended.append(RequestReport.of(trace, outcome=outcome, end_ns=end_ns))

    @property
    def num_running(self) -> int:
        return len(self._running)

    def running(self) -> list[RequestReport]:
        """Those that have come first."""
        first = list(self._running.values())[:KEPT]
        return [RequestReport.of(trace) for trace in first]

    def ended(self) -> list[RequestReport]:
        """The latest come last."""
        return list(self._ended)

    def num_by_tenant(self) -> dict[str, int]:
        """How many run, of all that do."""
        found: dict[str, int] = {}
        for trace in self._running.values():
            found[trace.tenant] = found.get(trace.tenant, 0) + 1
        return found

    def reset(self) -> None:
        """Begin as a new process."""
        self._running.clear()
        self._ended.clear()


JOURNAL = Journal()
"""This process's."""
os.register_at_fork(after_in_child=JOURNAL.reset)


def _longest(spans: Sequence[Span]) -> list[Span]:
    chosen: Sequence[Span] = spans
    if len(spans) > MAX_SPANS:
        chosen = heapq.nlargest(MAX_SPANS, spans, key=lambda span: span.end_ns - span.start_ns)
    return sorted(chosen, key=lambda span: (span.start_ns, span.end_ns))
