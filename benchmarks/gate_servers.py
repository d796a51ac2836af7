"""The sides of `benchmarks.gate`: their processes, started and ready for requests."""

from __future__ import annotations

import contextlib
import http.client
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

import afferent
from afferent.config import ServeConfig
from afferent.engines.remote.kind import RemoteLink
from afferent.errors import ConfigError
from afferent.media.families.plan import FeaturePlan
from afferent.media.families.qwen_vl import QwenVlFamily
from afferent.media.families.registry import describe
from afferent.media.headers.probe import ImageHeader
from afferent.media.workers.launch import ENV, POOL, THREAD_ENV, PoolSettings
from afferent.proxy.launch import FRONTEND, FrontendSettings
from afferent.runtime import wire
from afferent.runtime.process import Child
from afferent.runtime.sockets import new_address
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.types import GiB, ObjectKind, encode
from benchmarks import gate_engine
from benchmarks.children import starting, wait_ready
from benchmarks.controls import api_server
from benchmarks.gate_memory import anonymous_nbytes

MODEL = "pages"
NUM_WORKERS = 2

_FOLDER = Path(afferent.__file__).parent / "builtin" / "models" / "shapes"
_MIN_PIXELS, _MAX_PIXELS = 4 * 28 * 28, 16384 * 28 * 28
_RAW_SHARE = 0.25
_PATIENCE_S = 3600.0  # no request is refused for its duration
_POLL_S = 0.02
_START_TIMEOUT_S = 60.0


def family() -> QwenVlFamily:
    """Return a Qwen2-VL of the released sizes: 2,714 tokens for a page of 1275 x 1650."""
    built_in = describe(_FOLDER)
    if not isinstance(built_in, QwenVlFamily):
        raise ConfigError("the built-in model is of another family")
    return msgspec.structs.replace(built_in, min_pixels=_MIN_PIXELS, max_pixels=_MAX_PIXELS)


def plan(width: int, height: int) -> FeaturePlan:
    """Return the plan of a page's features."""
    return family().plan(ImageHeader(width, height))


@dataclass(frozen=True, slots=True)
class Server:
    """A side that is ready.

    Attributes:
        pids: Its processes, without those that they have started.
        arena_nbytes: The size of a limiting arena, which counts in full.
        in_use_nbytes: Returns the bytes in use, of an arena that does not limit.
        forget: Drops all features of earlier requests.
    """

    port: int
    pids: Sequence[int]
    arena_nbytes: int = 0
    in_use_nbytes: Callable[[], int] = lambda: 0
    forget: Callable[[], object] = lambda: None

    def growing_nbytes(self) -> int:
        """Return the current size of the memory that grows."""
        return anonymous_nbytes(self.pids) + self.in_use_nbytes()


Starter = Callable[[float], contextlib.AbstractContextManager[Server]]
"""Starts a side whose engine takes this many seconds for a request."""


@dataclass(frozen=True, slots=True)
class DataPlane:
    """A store and a preprocess pool, for one frontend after another."""

    config: ServeConfig
    counts_whole_arena: bool
    _server: StoreServer
    _pool_pid: int
    _store: DaemonStore

    @contextlib.contextmanager
    def serve(
        self, prefill_s: float, *, max_concurrency: int = 0, is_held: bool = False
    ) -> Iterator[Server]:
        """Run a frontend and an engine with this store.

        Args:
            max_concurrency: Requests between admission and the engine's acceptance; 0: no limit.
            is_held: The engine accepts a request only at its end.
        """
        config = msgspec.structs.replace(self.config, max_mm_preprocess_concurrency=max_concurrency)
        address, core_address = self._server.address, new_address("core")
        with contextlib.ExitStack() as stack:
            core_listener = stack.enter_context(wire.listen(core_address))
            engine_settings = gate_engine.Settings(
                store_address=address,
                listener_fd=core_listener.fileno(),
                prefill_s=prefill_s,
                accepts_at_end=is_held,
            )
            listener = stack.enter_context(_listener())
            frontend_settings = FrontendSettings(
                listener_fd=listener.fileno(),
                store_address=address,
                link=msgspec.Raw(encode(RemoteLink(address=core_address))),
                model_folder=str(_FOLDER),
                model_name=MODEL,
                family=family(),
                config=config,
            )
            children = [
                stack.enter_context(starting(name, module, settings, fds=[fd]))
                for name, module, settings, fd in (
                    ("engine", gate_engine.__name__, engine_settings, core_listener.fileno()),
                    ("frontend", FRONTEND, frontend_settings, listener.fileno()),
                )
            ]
            port = _wait_ready(children, listener)
            pids = [self._server.pid, self._pool_pid, *(child.pid for child in children)]
            if self.counts_whole_arena:
                yield Server(port, pids, self.config.arena_nbytes, forget=self._forget)
            else:
                yield Server(port, pids, 0, self._in_use_nbytes, self._forget)

    def _forget(self) -> None:
        self._store.evict(ObjectKind.FEATURES)

    def _in_use_nbytes(self) -> int:
        """Return the bytes of objects that are written, pinned or reserved."""
        return self._store.stat().held_nbytes


@contextlib.contextmanager
def data_plane(arena_nbytes: int, *, counts_whole_arena: bool) -> Iterator[DataPlane]:
    config = ServeConfig(
        arena_nbytes=arena_nbytes,
        raw_share=_RAW_SHARE,
        admission_timeout_s=_PATIENCE_S,
        request_timeout_s=_PATIENCE_S,
        body_timeout_s=_PATIENCE_S,
        body_idle_timeout_s=_PATIENCE_S,
    )
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            StoreServer(arena_nbytes, shares=config.shares, preallocate=True)
        )
        settings = PoolSettings(
            store_address=server.address,
            family=family(),
            limits=config.limits,
            num_workers=NUM_WORKERS,
            item_timeout_s=config.preprocess_timeout_s,
            memory_nbytes=GiB,
        )
        child = stack.enter_context(starting("pool", POOL, settings, env=ENV))
        wait_ready(child)
        store = stack.enter_context(DaemonStore(server.address, name="bench"))
        store.wait_populated()
        yield DataPlane(config, counts_whole_arena, server, child.pid, store)


@contextlib.contextmanager
def control(prefill_s: float) -> Iterator[Server]:
    """Run an API process and an engine as the baseline has them."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        listener = stack.enter_context(_listener())
        children = []
        for name in ("engine", "api"):
            settings = api_server.Settings(
                is_engine=name == "engine",
                folder=folder,
                prefill_s=prefill_s,
                listener_fd=listener.fileno(),
                family=family(),
            )
            fds, env = [listener.fileno()], THREAD_ENV
            child = starting(name, api_server.__name__, settings, fds=fds, env=env)
            children.append(stack.enter_context(child))
        port = _wait_ready(children, listener)
        yield Server(port, [child.pid for child in children])


def _listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=2048)


def _wait_ready(children: Sequence[Child], listener: socket.socket) -> int:
    """Return the port as soon as requests are served there."""
    for child in children:
        wait_ready(child)
    port: int = listener.getsockname()[1]
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_START_TIMEOUT_S)
        connection.request("GET", "/ready")
        status = connection.getresponse().status
        connection.close()
        if status == http.HTTPStatus.OK:
            return port
        time.sleep(_POLL_S)
    raise ConfigError("a server of the benchmark did not become ready")
