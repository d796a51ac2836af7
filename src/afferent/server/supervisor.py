"""The supervisor: starts every process, owns what they share, restarts what dies, drains.

It owns the arena's memory and the listening sockets, so that a restarted child finds them as they
were. When the store daemon dies, the others live on and connect to the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time

import msgspec

from afferent import __version__
from afferent.config import Loaded
from afferent.engine.contract import UpstreamKind
from afferent.errors import ConfigError
from afferent.preprocess.discover import family_of
from afferent.preprocess.families.adapter import AdapterFamily
from afferent.preprocess.registry import AnyFamily
from afferent.runtime import logs
from afferent.runtime.listening import Port
from afferent.runtime.process import LOST_PARTNERS, Child, LogSettings, Status, spawn
from afferent.server.checks import Checked, check, check_processes, exposure
from afferent.server.parts import Part, Plan
from afferent.server.watching import Watcher
from afferent.store import arena
from afferent.store.daemon.server import InheritedDescriptors

log = logging.getLogger(__name__)

_MAX_FAILED_STARTS = 3
_RESTART_S = 0.05
_RESTART_FAILED_S = 1.0
"""After a failed start, and twice as long after each more."""
_TERMINATE_TIMEOUT_S = 5.0


class Supervisor:
    """Runs one server until SIGTERM or Ctrl-C."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._config = config = loaded.config
        self._started_s = time.monotonic()
        self._log_settings = LogSettings(level=config.log_level, format=config.log_format)
        self._parts: dict[str, Part] = {}
        self._watcher: Watcher | None = None
        self._stop = asyncio.Event()
        self._num_signals = 0
        self._announced = False
        self._failure: str | None = None
        self._restarts: set[asyncio.Task[None]] = set()
        self._port: Port | None = None
        self._url = ""
        self._model_name = ""

    async def run(self) -> int:
        """Serve; the exit status.

        Raises:
            ConfigError: Nothing is left running.
            UnsupportedModel: Likewise.
        """
        logs.configure("supervisor", level=self._config.log_level, format=self._config.log_format)
        self._say("afferent", __version__)
        with contextlib.ExitStack() as owned:
            return await self._serve(self._plan(owned))

    async def _serve(self, plan: Plan) -> int:
        self._parts = plan.parts()
        watcher = self._watcher = Watcher(
            self._parts.values(), frozen_timeout_s=self._config.frozen_timeout_s
        )
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        watching = asyncio.create_task(watcher.run(self._on_frozen))
        try:
            await self._start_all(plan.inherited)
            await self._stop.wait()
            await self._drain()
        finally:
            watching.cancel()
            await self._kill_all()
        if self._failure is not None:
            _tell(f"error: {self._failure}")
            return 1
        self._say("stopped", "every process has ended")
        return 0

    # Start

    def _plan(self, owned: contextlib.ExitStack) -> Plan:
        """What can be refused is refused before a process starts.

        Args:
            owned: Gets what has to go at the end.
        """
        config = self._config
        checked = check(self._loaded)
        folder = checked.folder
        self._model_name = checked.model_name
        if warning := exposure(config):
            self._say("warning", warning)
        port = self._port = Port(config.host, config.port, num_listeners=config.frontends)
        self._url = port.url
        family = self._family(checked)
        self._say("model", f"{self._model_name} from {folder}")
        self._say("engine", f"{checked.engine.name}: {checked.engine.summary}")
        inherited = InheritedDescriptors.over(
            arena.open_segment(checked.arena_nbytes), path=config.store_path
        )
        owned.callback(inherited.close)
        site = checked.site(family, store_address=inherited.address)
        plan = checked.engine.plan(site, checked.engine_settings)
        for path in plan.files:
            owned.callback(path.unlink, missing_ok=True)
        check_processes(plan)
        for note in plan.notes:
            self._say("engine", note)
        return Plan(
            config=config,
            folder=folder,
            model_name=self._model_name,
            family=family,
            engine=plan,
            port=port,
            inherited=inherited,
        )

    def _family(self, checked: Checked) -> AnyFamily | None:
        """What features are made for the model; ``None`` if none are, and none have to be.

        Raises:
            UnsupportedModel: None can be made, and they are needed.
        """
        folder, engine, known = checked.folder, checked.engine, checked.family
        if isinstance(engine, UpstreamKind):
            # What the model's own processor makes, the one beside it makes as well.
            is_ours = known is not None and not isinstance(known, AdapterFamily)
            if is_ours and engine.takes_features(folder):
                return known
            self._say("model", f"{folder.name}: {engine.name} processes its media itself")
            return None
        if known is None:
            self._say("model", f"{folder.name}: asking its own processor (a few seconds)")
        return known or family_of(folder)

    async def _start_all(self, inherited: InheritedDescriptors) -> None:
        """First what takes longest, the engine's workers; the others once there is an arena."""
        for part in self._parts.values():
            if not part.needs_arena:
                self._start(part)
        start_s = time.monotonic()
        for _ in arena.allocate(inherited.arena_fd):
            await asyncio.sleep(0)  # for signals, and for what the children report
            if self._stop.is_set():
                return
        took_s = time.monotonic() - start_s
        how = "" if self._config.arena_nbytes else ", as suits the memory there is,"
        nbytes = os.fstat(inherited.arena_fd).st_size
        self._say("arena", f"{nbytes / 2**20:,.0f} MiB{how} allocated in {took_s:.2f} s")
        for part in self._parts.values():
            if part.needs_arena:
                self._start(part)

    def _start(self, part: Part) -> None:
        loop = asyncio.get_running_loop()
        part.is_ready = False
        settings, fds = part.settings(), part.fds
        with contextlib.ExitStack() as opened:
            if part.port is not None:
                listener = opened.enter_context(part.port.open())
                settings = msgspec.structs.replace(settings, listener_fd=listener.fileno())
                fds = (*fds, listener.fileno())
            part.child = spawn(
                part.name,
                part.module,
                settings,
                log=self._log_settings,
                fds=fds,
                env=part.env,
                board=self._watcher.board.place if self._watcher else None,
            )
        part.pidfd = os.pidfd_open(part.child.pid)
        loop.add_reader(part.child.status_fd, self._on_status, part, part.child)
        loop.add_reader(part.pidfd, self._on_death, part, part.child)

    # Events

    def _on_status(self, part: Part, child: Child) -> None:
        data = os.read(child.status_fd, 1 << 16)
        if not data:
            asyncio.get_running_loop().remove_reader(child.status_fd)
            return
        if self._stop.is_set():  # what is about to end has nothing to say any more
            return
        for line in data.splitlines():
            status = msgspec.json.decode(line, type=Status)
            self._say(part.name, f"ready: {status.text}" if status.ready else status.text)
            if status.ready:
                part.is_ready = part.has_been_ready = True
                part.num_failed_starts = 0
        if not self._announced and all(part.is_ready for part in self._parts.values()):
            self._announced = True
            took_s = time.monotonic() - self._started_s
            _tell(
                f'\nServing "{self._model_name}" on {self._url}/v1 '
                f"({took_s:.1f} s). Ctrl-C stops it.\n"
            )

    def _on_frozen(self, part: Part) -> None:
        if part.child is not None:
            silent_s = self._config.frozen_timeout_s
            self._say(part.name, f"has not gone on for {silent_s:g} s; it is killed")
            part.child.popen.kill()  # of its end we hear

    def _on_death(self, part: Part, child: Child) -> None:
        code = self._reap(part, child)
        if self._stop.is_set():
            return
        if not part.is_ready and code != LOST_PARTNERS:
            part.num_failed_starts += 1
            # What has run before may come to run again; the others are of use meanwhile.
            if part.num_failed_starts >= _MAX_FAILED_STARTS and not part.has_been_ready:
                self._failure = f"the {part.name} process can't be started; its log says why"
                self._stop.set()
                return
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        self._say(part.name, f"has ended ({how}); starting it again")
        task = asyncio.ensure_future(self._restart(part))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _restart(self, part: Part) -> None:
        failed = part.num_failed_starts
        await asyncio.sleep(_RESTART_FAILED_S * 2 ** min(failed - 1, 3) if failed else _RESTART_S)
        if self._stop.is_set() or part.child is not None:
            return
        try:
            self._start(part)
        except (OSError, ConfigError) as error:
            self._failure = f"{part.name} can't be started: {error}"
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
        """Let the frontends finish what they have begun, then end the others, the store last."""
        # While anybody holds the listening socket, the kernel lets new clients in to wait.
        if self._port is not None:
            self._port.close()
        fronts = [part for part in self._parts.values() if part.port is not None]
        await self._terminate(fronts, self._config.drain_timeout_s + _TERMINATE_TIMEOUT_S)
        store = self._parts["store"]
        rest = [part for part in self._parts.values() if part not in (*fronts, store)]
        await self._terminate(rest, _TERMINATE_TIMEOUT_S)
        await self._terminate([store], _TERMINATE_TIMEOUT_S)

    async def _terminate(self, parts: list[Part], timeout_s: float) -> None:
        for part in parts:
            if part.child is not None:
                part.child.popen.terminate()
        deadline = time.monotonic() + timeout_s
        while any(part.child is not None for part in parts) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def _kill_all(self) -> None:
        for part in self._parts.values():
            self._kill(part)

    def _kill(self, part: Part) -> None:
        """End a child at once; its own children die with it."""
        if part.child is not None:
            part.child.popen.kill()
            self._reap(part, part.child)

    def _reap(self, part: Part, child: Child) -> int:
        """The exit status of a child that has ended; its descriptors are closed."""
        code = child.popen.wait()
        if part.child is child:
            loop = asyncio.get_running_loop()
            loop.remove_reader(child.status_fd)
            loop.remove_reader(part.pidfd)
            os.close(part.pidfd)
            child.close()
            part.child = None
            if self._watcher is not None:
                self._watcher.forget(part)
        return code

    def _say(self, who: str, what: str) -> None:
        elapsed_s = time.monotonic() - self._started_s
        _tell(f"{elapsed_s:6.1f} s  {who:<11} {what}")


def _tell(line: str) -> None:
    """The operator; who may have closed the terminal, which must not keep us from ending."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
