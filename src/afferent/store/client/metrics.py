"""Metrics of the store: its `Statistics` under their public names."""

from __future__ import annotations

from afferent.admission.permits import PermitStatistics
from afferent.store.protocol.results import KindStatistics, Statistics
from afferent.telemetry.readings import Reading
from afferent.telemetry.registry import Observed, observed
from afferent.types import ObjectKind

_KINDS = tuple(ObjectKind)
_SEMAPHORES = ("preprocess", "forwarded", "live_audio", "uploads", "uploads_of", "tenant")
"""The gate's permits, MiB of tensors that an engine computes and of live audio, MiB of large bodies
until features are made, and all tenants' quotas together.
"""

_OF_STORE: tuple[Observed[Statistics], ...] = (
    observed(
        "counter",
        "afferent_store_hits_total",
        "Objects that were there when they were asked for",
        lambda store: store.num_hits,
    ),
    observed(
        "counter",
        "afferent_store_misses_total",
        "Objects that had to be made",
        lambda store: store.num_misses,
    ),
    observed(
        "counter",
        "afferent_store_joined_total",
        "Objects that were being made for another request already",
        lambda store: store.num_joined,
    ),
    observed(
        "gauge",
        "afferent_store_epoch",
        "The number of the daemon's life; it grows when a daemon has died",
        lambda store: store.segment,
    ),
    observed(
        "gauge",
        "afferent_store_clients",
        "Processes that are connected",
        lambda store: store.num_clients,
    ),
    observed(
        "gauge",
        "afferent_store_workers",
        "Processes that take jobs",
        lambda store: store.num_workers,
    ),
    observed(
        "gauge",
        "afferent_store_jobs_queued",
        "Jobs that wait for a worker",
        lambda store: store.num_jobs_queued,
    ),
    observed(
        "gauge",
        "afferent_store_jobs_running",
        "Jobs that a worker has",
        lambda store: store.num_jobs_running,
    ),
    observed(
        "gauge",
        "afferent_store_reservations_queued",
        "Requests that wait for room in the arena",
        lambda store: store.num_reservations_queued,
    ),
)

_OF_KIND: tuple[Observed[KindStatistics], ...] = (
    observed(
        "counter",
        "afferent_store_evictions_total",
        "Objects that were evicted",
        lambda share: share.num_evicted,
        kind=_KINDS,
    ),
    observed(
        "gauge",
        "afferent_store_objects",
        "Objects in the arena",
        lambda share: share.num_objects,
        kind=_KINDS,
    ),
    observed(
        "gauge",
        "afferent_store_pinned_objects",
        "Objects that are being written or pinned",
        lambda share: share.num_held,
        kind=_KINDS,
    ),
    observed(
        "gauge",
        "afferent_arena_capacity_bytes",
        "Bytes of a kind's share; those pinned and those reserved together never exceed it",
        lambda share: share.capacity_nbytes,
        kind=_KINDS,
    ),
    observed(
        "gauge",
        "afferent_arena_memory_bytes",
        "Bytes of a kind's share that have memory, used or not; the rest gets it when it is needed",
        lambda share: share.backed_nbytes,
        kind=_KINDS,
    ),
    observed(
        "gauge",
        "afferent_arena_used_bytes",
        "Bytes in objects",
        lambda share: share.used_nbytes,
        kind=_KINDS,
    ),
    observed(
        "gauge",
        "afferent_arena_pinned_bytes",
        "Bytes in objects that are being written or pinned, so never evicted",
        lambda share: share.held_nbytes,
        kind=_KINDS,
    ),
    observed(
        "gauge",
        "afferent_arena_reserved_bytes",
        "Bytes that requests have reserved and not used yet",
        lambda share: share.reserved_nbytes,
        kind=_KINDS,
    ),
    observed(
        "gauge",
        "afferent_arena_largest_free_bytes",
        "Bytes of the largest free extent",
        lambda share: share.largest_free_nbytes,
        kind=_KINDS,
    ),
)

_OF_SEMAPHORE: tuple[Observed[PermitStatistics], ...] = (
    observed(
        "gauge",
        "afferent_permits_taken",
        "Permits in use: of the gate, MiB of an engine's tensors and of large uploads, quotas",
        lambda semaphore: semaphore.num_held,
        semaphore=_SEMAPHORES,
    ),
    observed(
        "gauge",
        "afferent_permits_queued",
        "Requests that wait for a permit",
        lambda semaphore: semaphore.num_queued,
        semaphore=_SEMAPHORES,
    ),
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
