"""Metrics of the store: its `Statistics` under their public names."""

from __future__ import annotations

from afferent.admission.permits import PermitStatistics
from afferent.store.protocol.results import KindStatistics, Statistics
from afferent.telemetry.readings import Reading
from afferent.telemetry.registry import Observed, observed, observed_fields
from afferent.types import ObjectKind

_KINDS = tuple(ObjectKind)
_SEMAPHORES = ("preprocess", "forwarded", "live_audio", "uploads", "uploads_of", "tenant")
"""The gate's permits, MiB of tensors that an engine computes and of live audio, MiB of large bodies
until features are made, and all tenants' quotas together.
"""

_OF_STORE = observed_fields(
    Statistics,
    {
        "afferent_store_hits_total": (
            "num_hits",
            "Objects that were there when they were asked for",
        ),
        "afferent_store_misses_total": ("num_misses", "Objects that had to be made"),
        "afferent_store_joined_total": (
            "num_joined",
            "Objects that were being made for another request already",
        ),
        "afferent_store_epoch": (
            "segment",
            "The number of the daemon's life; it grows when a daemon has died",
        ),
        "afferent_store_clients": ("num_clients", "Processes that are connected"),
        "afferent_store_workers": ("num_workers", "Processes that take jobs"),
        "afferent_store_jobs_queued": ("num_jobs_queued", "Jobs that wait for a worker"),
        "afferent_store_jobs_running": ("num_jobs_running", "Jobs that a worker has"),
        "afferent_store_reservations_queued": (
            "num_reservations_queued",
            "Requests that wait for room in the arena",
        ),
    },
)

_OF_KIND = observed_fields(
    KindStatistics,
    {
        "afferent_store_evictions_total": ("num_evicted", "Objects that were evicted"),
        "afferent_store_objects": ("num_objects", "Objects in the arena"),
        "afferent_store_pinned_objects": ("num_held", "Objects that are being written or pinned"),
        "afferent_arena_capacity_bytes": (
            "capacity_nbytes",
            "Bytes of a kind's share; those pinned and those reserved together never exceed it",
        ),
        "afferent_arena_memory_bytes": (
            "backed_nbytes",
            "Bytes of a kind's share that have memory, used or not; the rest gets it when it is "
            "needed",
        ),
        "afferent_arena_used_bytes": ("used_nbytes", "Bytes in objects"),
        "afferent_arena_pinned_bytes": (
            "held_nbytes",
            "Bytes in objects that are being written or pinned, so never evicted",
        ),
        "afferent_arena_reserved_bytes": (
            "reserved_nbytes",
            "Bytes that requests have reserved and not used yet",
        ),
        "afferent_arena_largest_free_bytes": (
            "largest_free_nbytes",
            "Bytes of the largest free extent",
        ),
    },
    kind=_KINDS,
)

_OF_SEMAPHORE = observed_fields(
    PermitStatistics,
    {
        "afferent_permits_taken": (
            "num_held",
            "Permits in use: of the gate, MiB of an engine's tensors and of large uploads, quotas",
        ),
        "afferent_permits_queued": ("num_queued", "Requests that wait for a permit"),
    },
    semaphore=_SEMAPHORES,
)


_JOBS: Observed[int] = observed(
    "counter",
    "afferent_store_jobs_total",
    "Jobs that workers have ended, by outcome",
    lambda number: number,
    outcome=("made", "failed", "fetched"),
)


def store_readings(statistics: Statistics) -> list[Reading]:
    """Return the current readings of all metrics."""
    none = PermitStatistics(0, 0)
    semaphores = dict.fromkeys(_SEMAPHORES, none) | statistics.permits
    jobs = {
        "made": statistics.num_jobs_made,
        "failed": statistics.num_jobs_failed,
        "fetched": statistics.num_jobs_fetched,
    }
    return [
        *(metric.reading(statistics) for metric in _OF_STORE),
        _JOBS.reading_by(jobs),
        *(metric.reading_by(statistics.kinds) for metric in _OF_KIND),
        *(metric.reading_by(semaphores) for metric in _OF_SEMAPHORE),
    ]
