"""Metrics of an engine: the values of its `EngineStats`, by their public names.

An engine declares its further metrics where it counts (`afferent.telemetry.registry`): in the
frontend's process, or in one of its own that pushes its counts to the store
(`afferent.telemetry.pushing`). They appear on the same page, without a change here.
"""

from __future__ import annotations

from afferent.engines.protocol import EngineStats
from afferent.telemetry.readings import Reading
from afferent.telemetry.registry import Observed, observed

_MAX_WORKERS = 64

_OF_ENGINE: tuple[Observed[EngineStats], ...] = (
    observed(
        "gauge",
        "afferent_engine_requests_running",
        "Requests that steps are done for",
        lambda engine: engine.num_running,
    ),
    observed(
        "gauge",
        "afferent_engine_requests_waiting",
        "Requests that wait to be run",
        lambda engine: engine.num_waiting,
    ),
    observed(
        "gauge",
        "afferent_engine_kv_cache_usage",
        "Part of the KV cache in use, 0 to 1",
        lambda engine: engine.kv_in_use,
    ),
    observed(
        "counter",
        "afferent_engine_steps_total",
        "Steps",
        lambda engine: engine.num_steps,
    ),
    observed(
        "counter",
        "afferent_engine_prompt_tokens_total",
        "Positions of prompts that were computed, after a preemption again",
        lambda engine: engine.num_prompt_tokens,
    ),
    observed(
        "counter",
        "afferent_engine_decode_tokens_total",
        "Positions of answers that were computed",
        lambda engine: engine.num_decode_tokens,
    ),
    observed(
        "counter",
        "afferent_engine_cached_tokens_total",
        "Positions of prompts that were taken from the KV cache of earlier requests",
        lambda engine: engine.num_cached_tokens,
    ),
    observed(
        "counter",
        "afferent_engine_preemptions_total",
        "Requests that had to begin again for want of room",
        lambda engine: engine.num_preempted,
    ),
    observed(
        "counter",
        "afferent_engine_restarts_total",
        "Times that workers were lost",
        lambda engine: engine.num_restarts,
    ),
    observed(
        "counter",
        "afferent_engine_embeddings_found_total",
        "Items whose embeddings were in the store",
        lambda engine: engine.num_embeddings_found,
    ),
    observed(
        "gauge",
        "afferent_engine_encoder_cache_bytes",
        "Bytes of embeddings that each worker keeps",
        lambda engine: engine.cache_nbytes,
    ),
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
