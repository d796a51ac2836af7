"""Metrics of an engine: the values of its `EngineStats`, by their public names.

An engine declares its further metrics where it counts (`afferent.telemetry.registry`): in the
frontend's process, or in one of its own that pushes its counts to the store
(`afferent.telemetry.pushing`). They appear on the same page, without a change here.
"""

from __future__ import annotations

from afferent.engines.protocol import EngineStats
from afferent.telemetry.readings import Reading
from afferent.telemetry.registry import Observed, observed, observed_fields

_MAX_WORKERS = 64

_OF_ENGINE = observed_fields(
    EngineStats,
    {
        "afferent_engine_requests_running": ("num_running", "Requests that steps are done for"),
        "afferent_engine_requests_waiting": ("num_waiting", "Requests that wait to be run"),
        "afferent_engine_kv_cache_usage": ("kv_in_use", "Part of the KV cache in use, 0 to 1"),
        "afferent_engine_steps_total": ("num_steps", "Steps"),
        "afferent_engine_prompt_tokens_total": (
            "num_prompt_tokens",
            "Positions of prompts that were computed, after a preemption again",
        ),
        "afferent_engine_decode_tokens_total": (
            "num_decode_tokens",
            "Positions of answers that were computed",
        ),
        "afferent_engine_cached_tokens_total": (
            "num_cached_tokens",
            "Positions of prompts that were taken from the KV cache of earlier requests",
        ),
        "afferent_engine_preemptions_total": (
            "num_preempted",
            "Requests that had to begin again for want of room",
        ),
        "afferent_engine_restarts_total": ("num_restarts", "Times that workers were lost"),
        "afferent_engine_embeddings_found_total": (
            "num_embeddings_found",
            "Items whose embeddings were in the store",
        ),
        "afferent_engine_encoder_cache_bytes": (
            "cache_nbytes",
            "Bytes of embeddings that each worker keeps",
        ),
    },
)

_ENCODED: Observed[int] = observed(
    "counter",
    "afferent_engine_encoded_items_total",
    "Items that each engine worker has encoded",
    lambda num_encoded: num_encoded,
    worker=tuple(map(str, range(_MAX_WORKERS))),
)


def engine_readings(stats: EngineStats) -> list[Reading]:
    """Return all counts since the engine was started, and all current values."""
    encoded = {str(rank): number for rank, number in enumerate(stats.num_encoded)}
    return [*(metric.reading(stats) for metric in _OF_ENGINE), _ENCODED.reading_by(encoded)]
