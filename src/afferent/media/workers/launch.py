"""Settings of the preprocess pool, for the supervisor; imports no decoder."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from afferent.config import Limits
from afferent.media.families.registry import AnyFamily
from afferent.types import MiB

POOL: Final = "afferent.media.workers.pool"

THREAD_ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""One thread for each library."""
_HEAP_ENV = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * MiB),
    "MALLOC_TRIM_THRESHOLD_": str(128 * MiB),
    "MALLOC_TOP_PAD_": str(16 * MiB),
}
"""A worker reuses the memory of its last item.

Fresh pages for every image cost half of the time of its processor.
"""
ENV = {**THREAD_ENV, **_HEAP_ENV}
"""Environment variables of the pool."""


def worker_names(settings: PoolSettings) -> tuple[str, ...]:
    """Return the names of the pool's workers."""
    return tuple(f"preprocess-{index}" for index in range(settings.num_workers))


class PoolSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the pool.

    ``item_timeout_s`` is the processor time of one item; the store's daemon limits the elapsed
    time. ``memory_nbytes`` limits a worker's allocations, except the arena.
    """

    store_address: str
    family: AnyFamily
    limits: Limits
    num_workers: int
    item_timeout_s: float
    memory_nbytes: int
