"""Default numbers of processes, and the division of memory between them and the arena.

All of it follows from the settings, the cores and the memory that this process may use. The table
in docs/deploying.md has the results; a test compares it with this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from afferent.config import ServeConfig
from afferent.errors import ConfigError
from afferent.runtime import cgroup, memory
from afferent.types import GiB, MiB

_PART_OF_MEMORY = 0.9
_BASE_NBYTES = 384 * MiB
"""Memory of the processes without media, except the frontends and the engine.

120 MiB, and as much again for a tier and the live page. The rest is for torch, if the compiled part
is missing.
"""
_FRONTEND_NBYTES = 128 * MiB
"""Memory of one frontend: 60 MiB when idle, and the bodies of a hundred clients."""

_CORES_OF_FRONTEND = 8
_MOST_FRONTENDS = 16
_PART_OF_FRONTENDS = 1 / 16
"""Largest part of memory for frontends."""

_WORKER_NBYTES = GiB
"""Enough to decode an image of the most pixels that the limits allow, in any format."""
_LEAST_WORKER_NBYTES = 256 * MiB
_PART_OF_WORKERS = 2 / 3
"""Largest part of the memory left by the other processes."""

_MOST_ARENA_NBYTES = 4 * GiB
_GOOD_ARENA_NBYTES = 256 * MiB
_LEAST_ARENA_NBYTES = 128 * MiB


@dataclass(frozen=True, slots=True)
class Machine:
    """Resources of a machine that a server may use."""

    cores: int
    limit_nbytes: int

    @classmethod
    def here(cls) -> Self:
        """Return this machine by affinity, limits and control groups."""
        return cls(cgroup.num_cores(), memory.limit_nbytes())

    @property
    def usable_nbytes(self) -> int:
        """Memory to plan with: beyond a container's limit, the kernel kills instead of refusing."""
        return int(self.limit_nbytes * _PART_OF_MEMORY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a server: as set, or chosen if the settings leave them open."""

    frontends: int
    preprocess_workers: int
    preprocess_memory_nbytes: int
    """Memory of each worker."""
    arena_nbytes: int
    left_nbytes: int
    """Memory left beside all these."""


def choose(config: ServeConfig, machine: Machine, *, engine_nbytes: int) -> Sizes:
    """Fit a server into a machine.

    - A frontend for each 8 cores.
    - A preprocess worker for each core, if two thirds of the memory beside the other processes
      contain 1 GiB for each. If that is too little for one, it gets these two thirds, and at least
      256 MiB.
    - The arena gets half of the rest, at most an eighth of all memory, and at most 4 GiB: a large
      model needs the rest.

    Args:
        engine_nbytes: Memory reserved by the engine.

    Raises:
        ConfigError: The settings may need more than 90 % of the memory.
    """
    usable_nbytes = machine.usable_nbytes
    frontends = config.frontends or _num_frontends(machine)
    fixed_nbytes = engine_nbytes + _BASE_NBYTES + frontends * _FRONTEND_NBYTES
    free_nbytes = usable_nbytes - fixed_nbytes - config.arena_nbytes
    decoding_nbytes = int(free_nbytes * _PART_OF_WORKERS)
    worker_nbytes = config.preprocess_memory_nbytes or _WORKER_NBYTES
    workers = config.preprocess_workers or _within(decoding_nbytes // worker_nbytes, machine.cores)
    if not config.preprocess_memory_nbytes:
        fitting_nbytes = decoding_nbytes // workers // MiB * MiB
        worker_nbytes = max(min(_WORKER_NBYTES, fitting_nbytes), _LEAST_WORKER_NBYTES)
    beside_nbytes = fixed_nbytes + workers * worker_nbytes
    arena_nbytes = config.arena_nbytes or _arena_nbytes(usable_nbytes - beside_nbytes, machine)
    sizes = Sizes(
        frontends=frontends,
        preprocess_workers=workers,
        preprocess_memory_nbytes=worker_nbytes,
        arena_nbytes=arena_nbytes,
        left_nbytes=usable_nbytes - beside_nbytes - arena_nbytes,
    )
    if sizes.left_nbytes < 0:
        raise ConfigError(_refusal(sizes, machine, engine_nbytes))
    return sizes


def _num_frontends(machine: Machine) -> int:
    fitting = int(machine.usable_nbytes * _PART_OF_FRONTENDS) // _FRONTEND_NBYTES
    return _within(machine.cores // _CORES_OF_FRONTEND, min(fitting, _MOST_FRONTENDS))


def _arena_nbytes(left_nbytes: int, machine: Machine) -> int:
    chosen = min(left_nbytes // 2, machine.limit_nbytes // 8, _MOST_ARENA_NBYTES)
    least = max(min(_GOOD_ARENA_NBYTES, left_nbytes), _LEAST_ARENA_NBYTES)
    return max(chosen, least) // MiB * MiB


def _within(number: int, most: int) -> int:
    return max(1, min(number, most))


def _refusal(sizes: Sizes, machine: Machine, engine_nbytes: int) -> str:
    """Return the error message, with the sizes and the next steps."""
    decoding_nbytes = sizes.preprocess_workers * sizes.preprocess_memory_nbytes
    needed_nbytes = (machine.usable_nbytes - sizes.left_nbytes) / _PART_OF_MEMORY
    others_nbytes = _BASE_NBYTES + sizes.frontends * _FRONTEND_NBYTES
    return (
        f"an arena of {sizes.arena_nbytes / GiB:.1f} GiB, {decoding_nbytes / GiB:.1f} GiB for "
        f"what {sizes.preprocess_workers} preprocess workers may decode, "
        f"{engine_nbytes / GiB:.1f} GiB for the engine and {others_nbytes / GiB:.1f} GiB for the "
        f"other processes do not fit in {_PART_OF_MEMORY:.0%} of the "
        f"{machine.limit_nbytes / GiB:.1f} GiB of memory there is; choose a smaller --arena-nbytes "
        "or --preprocess-memory-nbytes, or fewer --preprocess-workers or --frontends, or give it "
        f"{needed_nbytes / GiB:.1f} GiB"
    )
