"""Observations for tests: of a frontend that has answered requests, and of a store."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from afferent.engines.protocol import EngineStats
from afferent.engines.upstream import UpstreamStats
from afferent.operations.live_page.observing import Observation
from afferent.proxy.reports import FrontendReport
from afferent.store.protocol.results import Statistics
from afferent.store.state.machine import StoreState
from afferent.telemetry.journal import Journal
from afferent.telemetry.trace import Trace
from afferent.types import MiB, Span

P = ParamSpec("P")

SECOND_NS = 1_000_000_000


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test in its own event loop."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 50))

    return run


def journal(*outcomes: str, tenant: str = "") -> Journal:
    """Return a buffer with one request per outcome; requests with an empty outcome still run."""
    found = Journal()
    for number, outcome in enumerate(outcomes):
        one = Trace(f"request-{number}", "POST /v1/chat/completions", tenant=tenant)
        at = one.start_ns
        one.spans += [
            Span("frontend-0", 7, "read_body", at, at + 1_000_000, 2048, "10 bytes"),
            Span("preprocess-1", 9, "decode", at + 1_000_000, at + 3_000_000, 4096),
        ]
        one.media, one.items = "image", ["2 images hit", "1 image made"]
        found.begin(one)
        if outcome:
            found.end(one, outcome)
    return found


def report(
    told: Journal,
    *,
    engine: EngineStats | None = None,
    upstream: UpstreamStats | None = None,
    taken_ns: int = 0,
    pid: int = 7,
) -> FrontendReport:
    latest_ns = max((each.end_ns for each in told.ended()), default=0)
    return FrontendReport(
        process=f"frontend-{pid}",
        pid=pid,
        model_name="shapes",
        store_address="/nowhere",
        taken_ns=taken_ns or latest_ns + SECOND_NS,
        num_running=told.num_running,
        num_by_tenant=told.num_by_tenant(),
        running=told.running(),
        ended=told.ended(),
        engine=engine,
        upstream=upstream,
    )


def statistics(capacity_nbytes: int = 64 * MiB, *, segment: int = 1) -> Statistics:
    return StoreState(capacity_nbytes, segment=segment).statistics()


def observation(*reports: FrontendReport, taken_s: float = 0.0, **parts: Any) -> Observation:
    return Observation(taken_s=taken_s, frontends=reports, **parts)
