"""What the server may need of the memory there is, and how much of it the arena gets."""

from __future__ import annotations

from afferent import memory
from afferent.config import ServeConfig
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


def arena_nbytes(config: ServeConfig) -> int:
    """The arena's size: as the settings say, or a part of what is left beside the processes.

    Half of what is left, at most an eighth of all, and 4 GiB: a model of some size needs the rest,
    and each GiB costs the start a second, and more in each process that maps it.

    Raises:
        ConfigError: The arena and the processes, whatever they are asked to decode, may need more
            than 90 % of the memory there is. Past a container's limit, allocating the arena would
            not fail: the kernel would kill us.
    """
    limit = memory.limit_nbytes()
    workers_nbytes = config.num_preprocess_workers * config.preprocess_memory_nbytes
    engine_nbytes = config.engine_workers * config.encoder_cache_nbytes
    base_nbytes = _BASE_NBYTES + config.frontends * _FRONTEND_NBYTES
    base_nbytes += (config.engine_workers - 1) * _ENGINE_WORKER_NBYTES
    left = int(limit * _PART_OF_MEMORY) - workers_nbytes - engine_nbytes - base_nbytes
    chosen = min(left // 2, limit // 8, _MOST_NBYTES) // MiB * MiB
    nbytes = config.arena_nbytes or max(chosen, _LEAST_NBYTES)
    if nbytes > left:
        raise ConfigError(
            f"an arena of {nbytes / GiB:.1f} GiB, {workers_nbytes / GiB:.1f} GiB for what "
            f"{config.num_preprocess_workers} preprocess workers may decode, "
            f"{engine_nbytes / GiB:.1f} GiB for embeddings that engine workers keep and "
            f"{base_nbytes / GiB:.1f} GiB for the processes do not fit in {_PART_OF_MEMORY:.0%} of "
            f"the {limit / GiB:.1f} GiB of memory there is; choose a smaller --arena-nbytes, or "
            "fewer --preprocess-workers or --frontends"
        )
    return nbytes
