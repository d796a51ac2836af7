"""Ray's object store, a Plasma: objects in shared memory that other processes view in place.

It uses Ray's own library, where it is installed (``make bench-ray``); otherwise this comparison is
left out. Each reader is an actor with its own process; Ray's own daemons run beside them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.rollout_holder import Held, total_of

MISSING = "ray: it is not installed, so its columns are empty; make bench-ray installs it"


def is_installed() -> bool:
    return find_spec("ray") is not None


class RayStore:
    """A store, and actors that read from it."""

    def __init__(self, ray: Any, readers: Sequence[Any]) -> None:
        self._ray, self._readers = ray, readers

    def put(self, array: NDArray[np.uint8] | dict[str, Any]) -> Any:
        """Store an array, or several; return a reference.

        The object is deleted with its last reference.
        """
        return self._ray.put(array)

    def get_all(self, references: Sequence[Any], num_readers: int) -> list[list[list[float]]]:
        """Get all objects in several readers at once; return the times of each reader.

        The times are microseconds until there is an array of each object, and until all its bytes
        are read.
        """
        calls = [reader.get_all.remote(list(references)) for reader in self._readers[:num_readers]]
        taken: list[list[list[float]]] = self._ray.get(calls)
        return taken

    def keep_all(self, references: Sequence[Any]) -> list[Held]:
        """Get all objects in one reader after another, which keep and read them."""
        return [self._ray.get(each.keep_all.remote(list(references))) for each in self._readers]


class _Reader:
    def __init__(self) -> None:
        self._kept: list[Any] = []

    def get_all(self, references: Sequence[Any]) -> list[list[float]]:
        ray: Any = importlib.import_module("ray")
        get_us, read_us = [], []
        for reference in references:
            start = time.perf_counter()
            array = ray.get(reference)
            get_us.append((time.perf_counter() - start) * 1e6)
            array.view(np.int64).sum()
            read_us.append((time.perf_counter() - start) * 1e6)
            del array
        return [get_us, read_us]

    def keep_all(self, references: Sequence[Any]) -> Held:
        ray: Any = importlib.import_module("ray")
        held = Held()
        for reference in references:
            start = time.perf_counter()
            features = ray.get(reference)
            held.open_ms.append((time.perf_counter() - start) * 1e3)
            held.total += total_of(features)
            self._kept.append(features)
        return held


@contextlib.contextmanager
def ray_store(
    nbytes: int, num_readers: int, *, preallocate: bool = True
) -> Iterator[RayStore | None]:
    """Run a store; yield ``None`` where Ray is not installed.

    Args:
        nbytes: Size of the store.
        num_readers: Readers, each with a process of its own.
        preallocate: Whether the store touches all its memory first.
    """
    if not is_installed():
        yield None
        return
    # Without it, the first use touches the pages.
    os.environ |= {"RAY_preallocate_plasma_memory": str(int(preallocate))}
    ray: Any = importlib.import_module("ray")
    ray.init(
        object_store_memory=nbytes,
        num_cpus=2,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
    )
    try:
        reader = ray.remote(num_cpus=0)(_Reader)
        readers = [reader.remote() for _ in range(num_readers)]
        store = RayStore(ray, readers)
        store.get_all([], num_readers)  # answered when they are ready
        yield store
    finally:
        ray.shutdown()
