"""End of a request: it is counted, logged, recorded and explained."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from afferent.proxy import counting
from afferent.telemetry.access import AccessLine
from afferent.telemetry.journal import JOURNAL
from afferent.telemetry.registry import gauge
from afferent.telemetry.trace import Trace

if TYPE_CHECKING:
    from afferent.telemetry.explain import Explainer

log = logging.getLogger(__name__)

IN_FLIGHT = gauge("afferent_requests_in_flight", "Requests being answered")


def tell(trace: Trace, api: str, outcome: str, explainer: Explainer | None) -> None:
    """Count, log, record and explain a finished request.

    Args:
        explainer: Prints an explanation on the console, if set.
    """
    seconds = (time.monotonic_ns() - trace.start_ns) / 1e9
    JOURNAL.end(trace, outcome)
    counting.count_request(trace, api, outcome, seconds=seconds)
    line = AccessLine.of(trace, api=api, outcome=outcome, seconds=seconds)
    log.info("request", extra=line.fields())
    if trace.root is not None:
        trace.root.end(trace, api=api, outcome=outcome)
    if explainer is not None:
        explainer.show(trace, outcome)
