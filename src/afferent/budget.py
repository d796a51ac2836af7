"""What the server may need of the memory there is, and how much of it the arena gets, and what
running requests hold in the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from afferent import memory
from afferent.config import ServeConfig
from afferent.engine.kv_budget import KvBudget
from afferent.errors import ConfigError
from afferent.types import GiB, MiB

_PART_OF_MEMORY = 0.9
_BASE_NBYTES = 11 * GiB // 8
"""What the processes take without any media, the frontends apart: imports of torch, mostly."""
_ENGINE_WORKER_NBYTES = GiB // 2
"""What each further engine worker adds to that, its part of the model apart."""
_FRONTEND_NBYTES = 128 * MiB
"""What one frontend takes: 40 MiB where nothing goes on, and the bodies of a hundred clients."""

_LEAST_NBYTES = 256 * MiB
_MOST_NBYTES = 4 * GiB
_LEAST_KV_NBYTES = 64 * MiB


def arena_nbytes(config: ServeConfig) -> int:
    """The arena's size: as the settings say, or a part of what is left beside the processes.

    Half of what is left, at most an eighth of all, and 4 GiB: a model of some size needs the rest,
    and each GiB costs the start a second, and more in each process that maps it.

    Raises:
        ConfigError: The arena and the processes, whatever they are asked to decode, may need more
            than 90 % of the memory there is. Past a container's limit, allocating the arena would
            not fail: the kernel would kill us.
    """
    taken = _taken(config)
    chosen = min(taken.left_nbytes // 2, taken.limit_nbytes // 8, _MOST_NBYTES) // MiB * MiB
    nbytes = config.arena_nbytes or max(chosen, _LEAST_NBYTES)
    if nbytes > taken.left_nbytes:
        raise ConfigError(
            f"an arena of {nbytes / GiB:.1f} GiB, {taken.workers_nbytes / GiB:.1f} GiB for what "
            f"{config.num_preprocess_workers} preprocess workers may decode, "
            f"{taken.engine_nbytes / GiB:.1f} GiB for embeddings that engine workers keep and "
            f"{taken.base_nbytes / GiB:.1f} GiB for the processes do not fit in "
            f"{_PART_OF_MEMORY:.0%} of the {taken.limit_nbytes / GiB:.1f} GiB of memory there is; "
            "choose a smaller --arena-nbytes, or fewer --preprocess-workers or --frontends"
        )
    return nbytes


def kv_budget(config: ServeConfig, *, arena_nbytes: int, weights_nbytes: int) -> KvBudget:
    """What running requests may hold of keys and values: as the settings say, or half of what is
    left beside the arena and the weights, which each engine worker loads; the other half is for
    what a step computes.

    It is the machine's memory that is divided here. Whose workers have their own, on GPUs, says
    how many tokens there is room for.

    Raises:
        ConfigError: One request may have more tokens than all.
    """
    if 0 < config.kv_cache_tokens < config.max_model_len:
        raise ConfigError(
            f"a request of {config.max_model_len:,} tokens, as --max-model-len allows, does not "
            f"fit into the {config.kv_cache_tokens:,} of --kv-cache-tokens"
        )
    if config.kv_cache_tokens:
        return KvBudget(num_tokens=config.kv_cache_tokens)
    taken_nbytes = arena_nbytes + config.engine_workers * weights_nbytes
    left_nbytes = _taken(config).left_nbytes - taken_nbytes
    return KvBudget(nbytes=max(left_nbytes // 2, _LEAST_KV_NBYTES))


@dataclass(frozen=True, slots=True)
class _Taken:
    """What is taken before the arena, and of what."""

    limit_nbytes: int
    workers_nbytes: int
    engine_nbytes: int
    base_nbytes: int

    @property
    def left_nbytes(self) -> int:
        taken_nbytes = self.workers_nbytes + self.engine_nbytes + self.base_nbytes
        return int(self.limit_nbytes * _PART_OF_MEMORY) - taken_nbytes


def _taken(config: ServeConfig) -> _Taken:
    base_nbytes = _BASE_NBYTES + config.frontends * _FRONTEND_NBYTES
    return _Taken(
        limit_nbytes=memory.limit_nbytes(),
        workers_nbytes=config.num_preprocess_workers * config.preprocess_memory_nbytes,
        engine_nbytes=config.engine_workers * config.encoder_cache_nbytes,
        base_nbytes=base_nbytes + (config.engine_workers - 1) * _ENGINE_WORKER_NBYTES,
    )
