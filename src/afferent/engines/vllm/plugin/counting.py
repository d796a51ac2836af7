"""Counts of a vLLM worker, for the server's metrics page."""

from __future__ import annotations

import threading
import time

from afferent.engines.vllm.plugin.arena import Arena
from afferent.errors import AfferentError
from afferent.telemetry.pushing import PERIOD_S
from afferent.telemetry.registry import REGISTRY, counter

ITEMS = counter(
    "afferent_vllm_items_total",
    "Items that vLLM's workers had to embed: encoded, found in the arena, or lost before that",
    outcome=("encoded", "found", "lost"),
)


def push_counts(arena: Arena) -> None:
    """Start a thread that pushes the counts for as long as the process lives."""
    threading.Thread(target=_push, args=(arena,), name="afferent-counts", daemon=True).start()


def _push(arena: Arena) -> None:
    REGISTRY.begin_at_zero()
    while True:
        time.sleep(PERIOD_S)
        try:
            arena.store.push_metrics(REGISTRY.source, REGISTRY.readings())
        except AfferentError:  # the store is away; the next push has these counts too
            continue
