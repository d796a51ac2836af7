"""Recent-requests buffer of this process: requests in flight and ended ones, with stages.

Reports are built only for a reader. A request in flight is its own `Trace`. An ended one stays
until `KEPT` others have ended. So a request costs two entries.
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
"""Number of ended requests that stay, and of requests in flight that are reported."""
_MAX_WHAT = 120
MAX_SPANS = 48
"""Number of reported spans of a request, the longest: one with a hundred images has hundreds."""


class RequestReport(Struct, frozen=True, forbid_unknown_fields=True):
    """Snapshot of a request's trace.

    Attributes:
        what: Method and path.
        where: Its current stage: one of `afferent.proxy.counting.PLACES`.
        outcome: Empty while it runs; then ``ok``, ``client_gone``, or the code of an error.
        start_ns: By `time.monotonic_ns`, as `end_ns`, which is 0 while it runs.
        items: Number of items of each kind, with their outcome.
        spans: In order of their begin.
        num_left_out: Number of shorter spans that are omitted.
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
    """Requests in flight and recently ended requests of one process."""

    def __init__(self) -> None:
        self._running: dict[str, Trace] = {}
        self._ended: deque[RequestReport] = deque(maxlen=KEPT)

    def begin(self, trace: Trace) -> None:
        self._running[trace.request_id] = trace

    def end(self, trace: Trace, outcome: str) -> None:
        """Record the end of a request; only the first call counts."""
        if self._running.pop(trace.request_id, None) is not None:
            end_ns = time.monotonic_ns()
            self._ended.append(RequestReport.of(trace, outcome=outcome, end_ns=end_ns))

    @property
    def num_running(self) -> int:
        return len(self._running)

    def running(self) -> list[RequestReport]:
        """Return the oldest requests in flight, at most `KEPT`."""
        first = list(self._running.values())[:KEPT]
        return [RequestReport.of(trace) for trace in first]

    def ended(self) -> list[RequestReport]:
        """Return the ended requests, the latest one last."""
        return list(self._ended)

    def num_by_tenant(self) -> dict[str, int]:
        """Return the number of all requests in flight by tenant."""
        found: dict[str, int] = {}
        for trace in self._running.values():
            found[trace.tenant] = found.get(trace.tenant, 0) + 1
        return found

    def reset(self) -> None:
        """Begin as a new process."""
        self._running.clear()
        self._ended.clear()


JOURNAL = Journal()
"""Journal of this process."""
os.register_at_fork(after_in_child=JOURNAL.reset)


def _longest(spans: Sequence[Span]) -> list[Span]:
    chosen: Sequence[Span] = spans
    if len(spans) > MAX_SPANS:
        chosen = heapq.nlargest(MAX_SPANS, spans, key=lambda span: span.end_ns - span.start_ns)
    return sorted(chosen, key=lambda span: (span.start_ns, span.end_ns))
