"""Page lock of the arena for the GPU, which then copies from it by DMA.

The whole map is registered, once: CUDA refuses a copy from a range that is registered in part. So
an arena that is allocated as it is filled is not locked.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol, Self

import torch

from afferent.store.arena import ArenaMap

log = logging.getLogger(__name__)

_READ_ONLY = 0x08  # cudaHostRegisterReadOnly: else a map that can't be written is refused


class _CudaRuntime(Protocol):
    """Two functions of the CUDA runtime; each returns an error number, or 0."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int: ...  # noqa: N802

    def cudaHostUnregister(self, address: int) -> int: ...  # noqa: N802


class PageLock:
    """Registers the map of one arena; where that fails, copies are slower, no more.

    Invariants:
        - At most one map is registered: `follow` unregisters the earlier one.
    """

    def __init__(self, runtime: _CudaRuntime) -> None:
        self._runtime = runtime
        self._arena: ArenaMap | None = None  # seen last, registered or refused
        self._is_registered = False

    @classmethod
    def of_this_machine(cls) -> Self | None:
        """Return a page lock; ``None`` where there is no GPU."""
        if not torch.cuda.is_available():
            return None
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return cls(runtime)

    def follow(self, arena: ArenaMap) -> None:
        """Register this map, unless it is the same as the last time."""
        if arena is self._arena:
            return
        self.release()
        self._arena = arena
        if not arena.is_whole:
            log.warning("the arena is not locked for the GPU without --preallocate-arena")
            return
        error = int(self._runtime.cudaHostRegister(arena.address, arena.nbytes, _READ_ONLY))
        self._is_registered = error == 0
        if error:
            log.warning("the arena can't be locked for the GPU", extra={"cuda_error": error})

    def release(self) -> None:
        """Unregister the map, before it is unmapped, or this process ends."""
        if self._arena is not None and self._is_registered:
            self._runtime.cudaHostUnregister(self._arena.address)
        self._arena, self._is_registered = None, False
