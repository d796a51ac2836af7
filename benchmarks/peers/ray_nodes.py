"""Ray's object transfer: arrays from the object store of another node into this node's.

It uses Ray's own library, where it is installed (``make bench-ray``). Two nodes on this machine
have a store each, and one of them is at the other end of a link. An actor there makes arrays; a get
of one transfers it over the link, into shared memory. After that, it is neither copied nor checked.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from afferent.errors import ConfigError
from benchmarks.link import Link, free_port
from benchmarks.peers.ray_store import is_installed

_START_TIMEOUT_S = 120.0
_STORE_NBYTES = 600 << 20
_THERE = "there"


class RayNodes:
    """Two nodes, with an actor on the other one."""

    def __init__(self, ray: Any, holder: Any) -> None:
        self._ray, self._holder = ray, holder

    def put(self, value: Any) -> Any:
        """Store a value on this node; return a reference."""
        return self._ray.put(value)

    def actor_there(self, kind: type, *arguments: Any) -> Any:
        """Start an actor on the other node."""
        return self._ray.remote(num_cpus=0, resources={_THERE: 0.01})(kind).remote(*arguments)

    def get(self, references: Any) -> Any:
        """Wait for the results of calls."""
        return self._ray.get(references)

    def fetch(self, number: int, nbytes: int) -> float:
        """Get new arrays of this size from the other node; return the milliseconds for all."""
        references = self._ray.get(self._holder.make.remote(number, nbytes))
        start_s = time.perf_counter()
        arrays = self._ray.get(references)
        took_ms = 1e3 * (time.perf_counter() - start_s)
        if any(array.nbytes != nbytes for array in arrays):
            raise ConfigError("Ray gave something else")
        del arrays, references
        return took_ms


class _Holder:
    def make(self, number: int, nbytes: int) -> list[Any]:
        ray: Any = importlib.import_module("ray")
        return [ray.put(np.full(nbytes, at, np.uint8)) for at in range(number)]


@contextlib.contextmanager
def ray_nodes(net: Link) -> Iterator[RayNodes | None]:
    """Run two nodes; yield ``None`` where Ray is not installed.

    Raises:
        ConfigError: The nodes do not start.
    """
    if not is_installed():
        yield None
        return
    # Nodes that are started by hand have no token of the cluster.
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    ray: Any = importlib.import_module("ray")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"]
        other = [f"--address={net.here}:{port}", '--resources={"' + _THERE + '":1}']
        processes = [
            _node((), net.here, head, Path(folder) / "head.log"),
            _node(net.there, net.host, other, Path(folder) / "other.log"),
        ]
        try:
            _wait_for(ray, f"{net.here}:{port}", net.here)
            actor = ray.remote(num_cpus=0, resources={_THERE: 0.01})(_Holder)
            nodes = RayNodes(ray, actor.remote())
            nodes.fetch(1, 1 << 20)  # wait until it runs
            yield nodes
        finally:
            ray.shutdown()
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(30)


def _node(
    there: tuple[str, ...], address: str, arguments: list[str], log: Path
) -> subprocess.Popen[bytes]:
    command = [*there, sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
    command += [f"--node-ip-address={address}", "--num-cpus=1", "--disable-usage-stats"]
    command += [f"--object-store-memory={_STORE_NBYTES}", *arguments]
    with log.open("wb") as out:
        return subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "RAY_preallocate_plasma_memory": "1"},
        )


def _wait_for(ray: Any, address: str, here: str) -> None:
    until_s = time.monotonic() + _START_TIMEOUT_S
    is_connected = False
    while time.monotonic() < until_s:
        try:
            if not is_connected:
                ray.init(
                    address,
                    _node_ip_address=here,
                    logging_level="error",
                    log_to_driver=False,
                )
                is_connected = True
            if _THERE in ray.cluster_resources():
                return
        except (ConnectionError, RuntimeError, ValueError):
            pass
        time.sleep(0.5)
    raise ConfigError("Ray's nodes do not start")
