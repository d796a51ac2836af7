"""The supervisor: starts every process, owns what they share, restarts what dies, drains.

It owns the arena's memory and the listening sockets, so that a restarted child finds them as they
were. When the store daemon dies, the others live on and connect to the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct

from afferent import __version__, logs, memory, wire
from afferent.config import ServeConfig
from afferent.engine import core, worker
from afferent.errors import ConfigError
from afferent.preprocess import pool
from afferent.preprocess.measure import family_of
from afferent.preprocess.registry import AnyFamily, describe
from afferent.process import Child, LogSettings, Status, spawn
from afferent.serve import frontend
from afferent.store import daemon
from afferent.store.server import Estate
from afferent.types import GiB

log = logging.getLogger(__name__)

BUILT_IN_MODELS = Path(__file__).parent / "models"

_MAX_FAILED_STARTS = 3
_RESTART_DELAY_S = 0.5
_TERMINATE_TIMEOUT_S = 5.0
_MIN_RECOVERY_S = 60.0
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
"""No progress bars between our lines, and nothing looked up on a hub."""

_BASE_NBYTES = 3 * GiB // 2
"""What the processes take without any media: four imports of torch, mostly."""


def model_folder(name: str) -> Path:
    """The folder of a built-in model, or of one on this machine.

    Raises:
        ConfigError: There is neither.
    """
    built_in = [BUILT_IN_MODELS / name] if "/" not in name else []
    for folder in (*built_in, Path(name).expanduser()):
        if (folder / "config.json").is_file():
            return folder.resolve()
    raise ConfigError(f"{name!r} is neither a built-in model nor a folder with a config.json")


@dataclass(slots=True, eq=False)
class _Part:
    """One child process, and how to start it again."""

    name: str
    module: str
    settings: Callable[[], Struct]
    fds: tuple[int, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    child: Child | None = None
    pidfd: int = -1
    is_ready: bool = False
    num_failed_starts: int = 0


class Supervisor:
    """Runs one server until SIGTERM or Ctrl-C."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._started_s = time.monotonic()
        self._log_settings = LogSettings(level=config.log_level, format=config.log_format)
        self._parts: dict[str, _Part] = {}
        self._stop = asyncio.Event()
        self._num_signals = 0
        self._segment = 1
        self._announced = False
        self._failure: str | None = None
        self._restarts: set[asyncio.Task[None]] = set()
        self._url = ""
        self._model_name = ""

    async def run(self) -> int:
        """Serve; the exit status.

        Raises:
            ConfigError: Nothing was started.
            UnsupportedModel: Likewise.
        """
        logs.configure("supervisor", level=self._config.log_level, format=self._config.log_format)
        self._say("afferent", __version__)
        self._prepare()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        try:
            for part in self._parts.values():
                self._start(part)
            await self._stop.wait()
            await self._drain()
        finally:
            await self._kill_all()
        if self._failure is not None:
            print(f"error: {self._failure}", file=sys.stderr)
            return 1
        self._say("stopped", "every process has ended")
        return 0

    # Start

    def _prepare(self) -> None:
        """Everything that can be refused is refused before a process starts."""
        config = self._config
        folder = model_folder(config.model)
        self._model_name = config.served_model_name or folder.name
        check_memory(config)
        listener = _bind(config.host, config.port)
        host, port = listener.getsockname()[:2]
        self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        is_reference = config.processor == "reference"
        if describe(folder, reference=is_reference) is None:
            self._say("model", f"{folder.name}: asking its own processor (a few seconds)")
        family = family_of(
            folder, reference=is_reference, max_sampled_frames=config.max_sampled_frames
        )
        self._say("model", f"{self._model_name} from {folder}")
        start_s = time.monotonic()
        estate = Estate.create(config.arena_nbytes)
        took_s = time.monotonic() - start_s
        self._say("arena", f"{config.arena_nbytes / 2**20:,.0f} MiB allocated in {took_s:.2f} s")
        self._make_parts(folder, family, listener, estate)

    def _make_parts(
        self, folder: Path, family: AnyFamily, listener: socket.socket, estate: Estate
    ) -> None:
        config = self._config
        store_address, core_address = estate.address, wire.new_address("core")
        http_fd = listener.detach()
        core_fd = wire.listen(core_address).detach()
        engine_threads = str(min(8, max(1, (os.cpu_count() or 2) - 1)))
        parts = [
            _Part(
                "store",
                daemon.__name__,
                lambda: estate.settings(
                    self._segment,
                    shares=config.shares,
                    job_timeout_s=config.preprocess_timeout_s,
                    # An encoder or a decoder may hold on for as long as an item may take.
                    recovery_timeout_s=max(_MIN_RECOVERY_S, config.preprocess_timeout_s),
                ),
                fds=estate.fds,
            ),
            _Part(
                "core",
                core.__name__,
                lambda: core.Settings(
                    store_address=store_address,
                    listener_fd=core_fd,
                    max_num_seqs=config.max_num_seqs,
                ),
                fds=(core_fd,),
            ),
            _Part(
                "worker",
                worker.__name__,
                lambda: worker.Settings(
                    store_address=store_address,
                    core_address=core_address,
                    model_folder=str(folder),
                    family=family,
                    max_model_len=config.max_model_len,
                ),
                env={"OMP_NUM_THREADS": engine_threads, **_QUIET},
            ),
            _Part(
                "preprocess",
                pool.__name__,
                lambda: pool.Settings(
                    store_address=store_address,
                    family=family,
                    limits=config.limits,
                    num_workers=config.num_preprocess_workers,
                    item_timeout_s=config.preprocess_timeout_s,
                    memory_nbytes=config.preprocess_memory_nbytes,
                ),
                env={**pool.ENV, **_QUIET},
            ),
            _Part(
                "frontend",
                frontend.__name__,
                lambda: frontend.Settings(
                    listener_fd=http_fd,
                    store_address=store_address,
                    core_address=core_address,
                    model_folder=str(folder),
                    model_name=self._model_name,
                    family=family,
                    config=config,
                ),
                fds=(http_fd,),
            ),
        ]
        self._parts = {part.name: part for part in parts}

    def _start(self, part: _Part) -> None:
        loop = asyncio.get_running_loop()
        part.is_ready = False
        part.child = spawn(
            part.name,
            part.module,
            part.settings(),
            log=self._log_settings,
            fds=part.fds,
            env=part.env,
        )
        part.pidfd = os.pidfd_open(part.child.pid)
        loop.add_reader(part.child.status_fd, self._on_status, part, part.child)
        loop.add_reader(part.pidfd, self._on_death, part, part.child)

    # Events

    def _on_status(self, part: _Part, child: Child) -> None:
        data = os.read(child.status_fd, 1 << 16)
        if not data:
            asyncio.get_running_loop().remove_reader(child.status_fd)
            return
        for line in data.splitlines():
            status = msgspec.json.decode(line, type=Status)
            self._say(part.name, f"ready: {status.text}" if status.ready else status.text)
            if status.ready:
                part.is_ready, part.num_failed_starts = True, 0
        if not self._announced and all(part.is_ready for part in self._parts.values()):
            self._announced = True
            print(
                f'\nServing "{self._model_name}" on {self._url}/v1 '
                f"({time.monotonic() - self._started_s:.1f} s). Ctrl-C stops it.\n",
                file=sys.stderr,
                flush=True,
            )

    def _on_death(self, part: _Part, child: Child) -> None:
        code = self._reap(part, child)
        if self._stop.is_set():
            return
        if not part.is_ready:
            part.num_failed_starts += 1
            if part.num_failed_starts >= _MAX_FAILED_STARTS:
                self._failure = f"the {part.name} process can't be started; its log says why"
                self._stop.set()
                return
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        self._say(part.name, f"has ended ({how}); starting it again")
        if part.name == "store":
            self._segment += 1  # a new epoch: the others connect again
        task = asyncio.ensure_future(self._restart(part))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _restart(self, part: _Part) -> None:
        await asyncio.sleep(_RESTART_DELAY_S)
        if self._stop.is_set() or part.child is not None:
            return
        try:
            self._start(part)
        except OSError as error:
            self._failure = f"{part.name} can't be started: {error.strerror}"
            self._stop.set()

    def _on_signal(self) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._say("stopping", "finishing running requests; press Ctrl-C again to end at once")
            self._stop.set()
        else:
            for part in self._parts.values():
                self._kill(part)

    # End

    async def _drain(self) -> None:
        """Let the frontend finish what it has begun, then end the others, the store last."""
        front = self._parts["frontend"]
        # While anybody holds the listening socket, the kernel lets new clients in to wait.
        os.close(front.fds[0])
        await self._terminate([front], self._config.drain_timeout_s + _TERMINATE_TIMEOUT_S)
        store = self._parts["store"]
        rest = [part for part in self._parts.values() if part not in (front, store)]
        await self._terminate(rest, _TERMINATE_TIMEOUT_S)
        await self._terminate([store], _TERMINATE_TIMEOUT_S)

    async def _terminate(self, parts: list[_Part], timeout_s: float) -> None:
        for part in parts:
            if part.child is not None:
                part.child.popen.terminate()
        deadline = time.monotonic() + timeout_s
        while any(part.child is not None for part in parts) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def _kill_all(self) -> None:
        for part in self._parts.values():
            self._kill(part)

    def _kill(self, part: _Part) -> None:
        """End a child at once; its own children die with it."""
        if part.child is not None:
            part.child.popen.kill()
            self._reap(part, part.child)

    def _reap(self, part: _Part, child: Child) -> int:
        """The exit status of a child that has ended; its descriptors are closed."""
        code = child.popen.wait()
        if part.child is child:
            loop = asyncio.get_running_loop()
            loop.remove_reader(child.status_fd)
            loop.remove_reader(part.pidfd)
            os.close(part.pidfd)
            child.close()
            part.child = None
        return code

    def _say(self, who: str, what: str) -> None:
        elapsed_s = time.monotonic() - self._started_s
        print(f"{elapsed_s:6.1f} s  {who:<11} {what}", file=sys.stderr, flush=True)


def check_memory(config: ServeConfig) -> None:
    """Refuse an arena that does not fit beside the processes, whatever they are asked to decode.

    Past a container's limit, allocating the arena would not fail: the kernel would kill us.

    Raises:
        ConfigError: The arena and the processes may need more than 90 % of the memory there is.
    """
    limit = memory.limit_nbytes()
    workers_nbytes = config.num_preprocess_workers * config.preprocess_memory_nbytes
    if config.arena_nbytes + workers_nbytes + _BASE_NBYTES > limit * 0.9:
        raise ConfigError(
            f"an arena of {config.arena_nbytes / GiB:.1f} GiB, {workers_nbytes / GiB:.1f} GiB for "
            f"what {config.num_preprocess_workers} preprocess workers may decode and "
            f"{_BASE_NBYTES / GiB:.1f} GiB for the processes do not fit in 90 % of the "
            f"{limit / GiB:.1f} GiB of memory there is; choose a smaller --arena-nbytes, or fewer "
            "--preprocess-workers"
        )


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror}") from error
    listener.listen(2048)
    return listener
