"""What starts the preprocess pool needs to know of it, without importing a decoder."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from afferent.config import Limits
from afferent.preprocess.registry import AnyFamily
from afferent.types import MiB

POOL: Final = "afferent.preprocess.pool"

THREAD_ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""One thread a library."""
_HEAP_ENV = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * MiB),
    "MALLOC_TRIM_THRESHOLD_": str(128 * MiB),
    "MALLOC_TOP_PAD_": str(16 * MiB),
}
"""A worker keeps the memory of its last item for the next: fresh pages for every image cost half
of the time that its processor takes.
"""
ENV = {**THREAD_ENV, **_HEAP_ENV}
"""What the pool's environment has to say."""


def worker_names(settings: PoolSettings) -> tuple[str, ...]:
    """What the pool's workers are called."""
    return tuple(f"preprocess-{index}" for index in range(settings.num_workers))


class PoolSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """``item_timeout_s`` is the processor time of one item; the store's daemon watches the clock.
    ``memory_nbytes`` is what a worker may allocate, the arena apart.
    """

    store_address: str
    family: AnyFamily
    limits: Limits
    num_workers: int
    item_timeout_s: float
    memory_nbytes: int
