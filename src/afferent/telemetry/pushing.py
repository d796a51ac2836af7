"""Periodic push of a process's counts to the store daemon, which adds them up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from afferent.errors import AfferentError, Unavailable
from afferent.telemetry.readings import Reading
from afferent.telemetry.registry import REGISTRY, Registry

log = logging.getLogger(__name__)

PERIOD_S = 1.0


class Sink(Protocol):
    """Receiver of counts, such as `AsyncDaemonStore`."""

    @property
    def is_open(self) -> bool: ...

    async def push_metrics(self, source: int, readings: Sequence[Reading]) -> None: ...


async def push_counts(sink: Sink, registry: Registry = REGISTRY) -> None:
    """Push until cancelled; counts are cumulative, so a missed push loses nothing."""
    is_refused = False
    while True:
        await asyncio.sleep(PERIOD_S)
        if not sink.is_open:
            continue
        try:
            await sink.push_metrics(registry.source, registry.readings())
            is_refused = False
        except Unavailable:
            continue
        except AfferentError as error:  # declarations differ between processes: logged once
            if not is_refused:
                log.warning("counts were refused", extra={"reason": error.message})
            is_refused = True
