"""LightLLM's own cache server, from a clone of LightLLM, in its own process.

    python -m benchmarks.peers.lightllm_own FOLDER PORT

It is the form of LightLLM's first version, with one call after another for each item: allocate, ask
for its data, write a segment of shared memory, and report the data. A clone of 2025-07-11 (commit
fc72ffab) was measured. The process of the benchmark and this one need rpyc, requests and torch.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from afferent.errors import ConfigError
from benchmarks.children import command, free_port
from benchmarks.peers.lightllm import md5

_CAPACITY = 1_000_000
"""So many items that it never looks for one to remove within a measurement."""
_START_TIMEOUT_S = 120.0


class OwnClient:
    """A frontend's connection to the server, with LightLLM's own functions for segments."""

    def __init__(self, root: Any, utils: Any) -> None:
        self._root, self._utils = root, utils

    def store(self, paths: Sequence[Path], *, suffix: str, num_tokens: int) -> list[str]:
        """Read, digest and store all files, as its frontend does; return the segments' names."""
        return [self._store_one(path, suffix, num_tokens) for path in paths]

    def _store_one(self, path: Path, suffix: str, num_tokens: int) -> str:
        data = path.read_bytes()
        record = self._root.alloc(md5(data) + suffix, num_tokens)
        number = record["id"]
        name: str = self._utils.get_shm_name_data(number)
        if self._root.get_item_data(number):
            raise RuntimeError("the benchmark met an image that was there already")
        self._utils.create_shm(name, data)
        self._root.set_item_data(number)
        return name

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            segment = SharedMemory(name=name)
            segment.close()
            segment.unlink()


@contextlib.contextmanager
def own_server(clone: Path) -> Iterator[OwnClient]:
    """Run a server; yield a connection to it.

    Raises:
        ConfigError: The folder is no such clone, or a package is missing.
    """
    sys.path.append(str(clone))
    try:
        rpyc: Any = importlib.import_module("rpyc")
        utils = importlib.import_module("lightllm.server.embed_cache.utils")
    except ImportError as error:
        raise ConfigError(f"--lightllm {clone}: {error}; it needs rpyc and requests") from error
    port = free_port()
    line = [sys.executable, "-m", "benchmarks.peers.lightllm_own", str(clone), str(port)]
    with command(line, env={"LIGHTLLM_LOG_LEVEL": "error"}) as child:
        end_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                connection = rpyc.connect("localhost", port)
                break
            except OSError:
                if child.poll() is not None or time.monotonic() > end_s:
                    raise ConfigError(f"--lightllm {clone}: its server does not start") from None
                time.sleep(0.1)
        with contextlib.closing(connection):
            yield OwnClient(connection.root, utils)


def main() -> None:
    sys.path.append(sys.argv[1])
    manager: Any = importlib.import_module("lightllm.server.embed_cache.manager")
    settings = SimpleNamespace(
        cache_capacity=_CAPACITY,
        cache_reserved_ratio=0.5,
        config_server_host=None,
        config_server_port=None,
    )
    _, pipe = multiprocessing.Pipe()
    manager.start_cache_manager(int(sys.argv[2]), settings, pipe)


if __name__ == "__main__":
    main()
