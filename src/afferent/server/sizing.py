"""What the server may need of the memory there is, and how much of it the arena gets."""

from __future__ import annotations

from afferent.config import ServeConfig
from afferent.errors import ConfigError
from afferent.runtime import memory
from afferent.types import GiB, MiB

_PART_OF_MEMORY = 0.9
_BASE_NBYTES = 7 * GiB // 8
"""What the processes take without any media, the frontends' and the engine's apart: imports of
torch, mostly.
"""
_FRONTEND_NBYTES = 128 * MiB
"""What one frontend takes: 40 MiB where nothing goes on, and the bodies of a hundred clients."""

_LEAST_NBYTES = 256 * MiB
_MOST_NBYTES = 4 * GiB


def arena_nbytes(config: ServeConfig, *, engine_nbytes: int) -> int:
    """The arena's size: as the settings say, or a part of what is left beside the processes.

    Half of what is left, at most an eighth of all, and 4 GiB: a model of some size needs the rest.

    Args:
        engine_nbytes: What the engine has reserved.

    Raises:
        ConfigError: The arena and the processes, whatever they are asked to decode, may need more
            than 90 % of the memory there is. Past a container's limit, allocating the arena would
            not fail: the kernel would kill us.
    """
    limit_nbytes, left_nbytes = memory.limit_nbytes(), _left_nbytes(config, engine_nbytes)
    chosen = min(left_nbytes // 2, limit_nbytes // 8, _MOST_NBYTES) // MiB * MiB
    nbytes = config.arena_nbytes or max(chosen, _LEAST_NBYTES)
    if nbytes > left_nbytes:
        raise ConfigError(
            f"an arena of {nbytes / GiB:.1f} GiB, {_decoding_nbytes(config) / GiB:.1f} GiB for "
            f"what {config.num_preprocess_workers} preprocess workers may decode, "
            f"{engine_nbytes / GiB:.1f} GiB for the engine and "
            f"{_processes_nbytes(config) / GiB:.1f} GiB for the other processes do not fit in "
            f"{_PART_OF_MEMORY:.0%} of the {limit_nbytes / GiB:.1f} GiB of memory there is; "
            "choose a smaller --arena-nbytes, or fewer --preprocess-workers or --frontends"
        )
    return nbytes


def left_nbytes(config: ServeConfig, *, engine_nbytes: int, arena_nbytes: int) -> int:
    """What the server may use beside all that; less than 0 where the arena is more than fits."""
    return _left_nbytes(config, engine_nbytes) - arena_nbytes


def _left_nbytes(config: ServeConfig, engine_nbytes: int) -> int:
    """Beside everything but the arena."""
    taken_nbytes = engine_nbytes + _decoding_nbytes(config) + _processes_nbytes(config)
    return int(memory.limit_nbytes() * _PART_OF_MEMORY) - taken_nbytes


def _decoding_nbytes(config: ServeConfig) -> int:
    return config.num_preprocess_workers * config.preprocess_memory_nbytes


def _processes_nbytes(config: ServeConfig) -> int:
    return _BASE_NBYTES + config.frontends * _FRONTEND_NBYTES
