"""Replacement of functions in the modules that run in a simulation."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.simulator.descriptors import PAGE_NBYTES
from tests.simulator.system import STAND_INS, ProcessTable

MODULES = (
    "afferent.runtime.wire",
    "afferent.store.arena",
    "afferent.store.backing",
    "afferent.store.client.async_store",
    "afferent.store.client.daemon_store",
    "afferent.store.client.handshake",
    "afferent.store.client.owner",
    "afferent.store.client.views",
    "afferent.store.daemon.client_table",
    "afferent.store.daemon.main",
    "afferent.store.segment",
    "afferent.telemetry.trace",
    "afferent.types",
)
"""Modules in which the store's processes use the operating system."""

_BESIDES: dict[tuple[str, str], Any] = {
    ("afferent.store.advice", "_libc"): SimpleNamespace(madvise=lambda *_: 0),
    # Whether this machine offers huge pages must not change a run.
    ("afferent.store.backing", "_HUGE_PAGES"): Path(os.devnull),
    ("afferent.store.backing", "CHUNK_NBYTES"): 2 * PAGE_NBYTES,
    ("afferent.store.backing", "AHEAD_NBYTES"): 2 * PAGE_NBYTES,
    ("afferent.store.backing", "memory"): SimpleNamespace(
        available_nbytes=lambda: 1 << 40, limit_nbytes=lambda: 1 << 40
    ),
    ("afferent.store.daemon.client_table", "ProcStat"): ProcessTable,
    ("afferent.store.daemon.main", "_allow_many_descriptors"): lambda: None,
    # Polling finds nothing, because time stands still meanwhile.
    ("afferent.store.daemon.main", "_AWAKE_S"): 0.0,
    ("afferent.store.daemon.main", "_MOST_MISSES"): 0,
}


@contextmanager
def simulated(modules: Iterable[str] = ()) -> Iterator[None]:
    """Replace the operating system: only a `Machine` can run the store's processes meanwhile.

    Args:
        modules: Further modules to replace it in, such as an engine's.
    """
    before: list[tuple[Any, str, Any]] = []
    for name in (*MODULES, *modules):
        module = importlib.import_module(name)
        for each, stand_in in STAND_INS.items():
            if vars(module).get(each) is stand_in._module:
                before.append((module, each, stand_in._module))
                setattr(module, each, stand_in)
    for (name, each), stand_in in _BESIDES.items():
        module = importlib.import_module(name)
        before.append((module, each, getattr(module, each)))
        setattr(module, each, stand_in)
    try:
        yield
    finally:
        for module, each, real in before:
            setattr(module, each, real)
