"""What is counted of a request, from its account, and of the event loop that all of them share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from afferent import errors
from afferent.metrics import Metrics
from afferent.serve.account import Account
from afferent.serve.request import MediaPart

_NO_ROOM = (errors.StoreFull.code, errors.ArenaTooSmall.code, errors.DeadlineExceeded.code)
"""What the gate says to a body; one that is late itself is `BodyTooSlow`."""

_TICK_S = 0.1


def media_of(parts: Sequence[MediaPart]) -> str:
    """One word for the modality of a request's media."""
    found = {part.modality for part in parts}
    if len(found) > 1:
        return "mixed"
    return str(found.pop()) if found else "none"


def count_request(
    metrics: Metrics, account: Account, api: str, outcome: str, *, seconds: float
) -> None:
    """A request has ended: ``ok``, ``client_gone``, or with an error of that code."""
    metrics.requests.labels(api, outcome).inc()
    metrics.request_seconds.labels(api).observe(seconds)
    if outcome != "ok":
        is_refused = account.where == "body" and outcome in _NO_ROOM
        where = "admission" if is_refused else account.where
        metrics.rejections.labels(outcome, where, account.media).inc()


def count_stages(metrics: Metrics, account: Account) -> None:
    """The stages that a request has come through."""
    for span in account.spans:
        labels = (span.stage, account.media)
        metrics.stage_seconds.labels(*labels).observe((span.end_ns - span.start_ns) / 1e9)
        if span.copied_nbytes:
            metrics.copied_nbytes.labels(*labels).inc(span.copied_nbytes)


async def count_lateness(metrics: Metrics) -> None:
    """How late this event loop comes to what is due, again and again, until cancelled."""
    while True:
        due_s = time.monotonic() + _TICK_S
        await asyncio.sleep(_TICK_S)
        metrics.loop_seconds.observe(max(0.0, time.monotonic() - due_s))
