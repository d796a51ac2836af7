"""How a process's counts come to where all are added up: all of them, again and again."""

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
    """Where counts go: `AsyncDaemonStore` is one."""

    @property
    def is_open(self) -> bool: ...

    async def push_metrics(self, source: int, readings: Sequence[Reading]) -> None: ...


async def push_counts(sink: Sink, registry: Registry = REGISTRY) -> None:
    """Push until cancelled; while nobody is there, nothing is lost by waiting."""
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
        except AfferentError as error:  # a metric of this process is not as another's: said once
            if not is_refused:
                log.warning("counts were refused", extra={"reason": error.message})
            is_refused = True
