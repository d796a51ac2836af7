"""Load report for routers, on request: a header with the server's load, in the format of ORCA.

A request with ``endpoint-load-metrics-format: TEXT`` (or ``JSON``) gets the header
``endpoint-load-metrics`` with its answer, as from vLLM. Afferent adds its own values to those of
the engine: the free bytes of the arena, and the expected wait at the gate.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from afferent.admission.gate import Gate
from afferent.engines.protocol import EngineStats
from afferent.errors import AfferentError
from afferent.proxy.sharing import Shared
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.types import ObjectKind

log = logging.getLogger(__name__)

_ASKED: Final = b"endpoint-load-metrics-format"
_GIVEN: Final = b"endpoint-load-metrics"
_FORMATS: Final = ("TEXT", "JSON")
_NAME: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

Headers = Sequence[tuple[bytes, bytes]]
Stats = Callable[[], Awaitable[EngineStats | None]]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Load when a request came, in the format that it asks for; empty if it does not ask."""

    wish: str = ""
    values: Mapping[str, float] = field(default_factory=dict)

    def added_to(self, answer: Headers) -> list[tuple[bytes, bytes]]:
        """Return an answer's headers with this report; a report of the engine is extended."""
        if not self.wish:
            return list(answer)
        given = next((value for name, value in answer if name.lower() == _GIVEN), b"")
        values = {**_values_in(given), **self.values}
        others = [(name, value) for name, value in answer if name.lower() != _GIVEN]
        return [*others, (_GIVEN, _report(self.wish, values))]


class LoadReports:
    """Load of one server, as one of its frontends sees it."""

    def __init__(self, store: AsyncDaemonStore, gate: Gate, stats: Stats | None = None) -> None:
        """Create it; ``stats`` returns the statistics of an engine that gives no report itself."""
        self._store, self._gate, self._stats = store, gate, stats
        self._values = Shared(self._measured)

    async def look(self, asked: Headers) -> LoadReport:
        """Return the report that a request asks for; it never fails.

        Args:
            asked: The request's headers, with lower-case names.
        """
        wish = next((value for name, value in asked if name == _ASKED), b"")
        chosen = wish.decode("latin-1").strip().upper()
        if chosen not in _FORMATS:
            return LoadReport()
        return LoadReport(chosen, await self._values.get())

    async def _measured(self) -> dict[str, float]:
        wait_s = self._gate.retry_after_s if self._gate.num_waiting else 0.0
        values = {"afferent_predicted_wait_s": wait_s}
        if self._stats is not None:
            values |= await _engine_values(self._stats)
        try:
            features = (await self._store.stat()).kinds[ObjectKind.FEATURES]
        except AfferentError:  # the store restarts
            return values
        taken = features.held_nbytes + features.reserved_nbytes
        free_nbytes = max(0, features.capacity_nbytes - taken)
        return {**values, "afferent_arena_free_bytes": float(free_nbytes)}


async def _engine_values(stats: Stats) -> dict[str, float]:
    """Return an engine's load; nothing if it does not report it."""
    try:
        found = await stats()
    except Exception:  # an engine of another package may raise anything
        log.exception("the engine gives no statistics")
        return {}
    if found is None:
        return {}
    return {
        "num_requests_running": float(found.num_running),
        "num_requests_waiting": float(found.num_waiting),
        "kv_cache_usage_perc": found.kv_in_use,
    }


def _report(wish: str, values: Mapping[str, float]) -> bytes:
    if wish == "JSON":
        return b"JSON " + json.dumps({"named_metrics": dict(values)}).encode()
    named = (f"named_metrics.{name}={value}" for name, value in values.items())
    return ("TEXT " + ", ".join(named)).encode()


def _values_in(report: bytes) -> dict[str, float]:
    """Return the named values of a report; none of a malformed one."""
    wish, _, text = report.decode("latin-1").partition(" ")
    try:
        if wish == "JSON":
            found = {name: float(each) for name, each in json.loads(text)["named_metrics"].items()}
        else:
            pairs = (part.strip().partition("=") for part in text.split(",") if part.strip())
            found = {name.removeprefix("named_metrics."): float(each) for name, _, each in pairs}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {
        name: value
        for name, value in found.items()
        if _NAME.fullmatch(name) and math.isfinite(value)
    }
