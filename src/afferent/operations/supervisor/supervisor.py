"""Supervisor: starts every process, owns shared resources, restarts dead processes, drains.

It owns the arena's memory and the listening sockets, so that a restarted child finds them
unchanged. If the store daemon dies, the other processes keep running and connect to the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping

import msgspec

from afferent import __version__
from afferent.config import Loaded
from afferent.errors import ConfigError
from afferent.operations.supervisor import control
from afferent.operations.supervisor.parts import Part, Plan
from afferent.operations.supervisor.preparing import prepare
from afferent.operations.supervisor.restarting import ENGINE_ENDS_S, Restarts
from afferent.operations.supervisor.watching import Watcher
from afferent.runtime import logs
from afferent.runtime.listening import Port
from afferent.runtime.process import (
    LOST_PARTNERS,
    ONE_THREAD,
    REFUSED,
    Child,
    LogSettings,
    Status,
    spawn,
)
from afferent.store import segment
from afferent.store.daemon.server import InheritedDescriptors

log = logging.getLogger(__name__)

_MAX_FAILED_STARTS = 3
_RESTART_S = 0.05
_RESTART_FAILED_S = 1.0
"""Delay after a failed start; it doubles with each further failure."""
_TERMINATE_TIMEOUT_S = 5.0


def _end_at_once(signum: int, _frame: object) -> None:
    raise SystemExit(128 + signum)


class Supervisor:
    """Supervisor of one server, until SIGTERM or Ctrl-C.

    Invariants:
        - A part in ``_parts`` without a child gets a new one, unless the server stops.
        - A part in ``_extra`` is not restarted.
    """

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
        self._extra: list[Part] = []
        """Successors that are not ready yet, and replaced parts that finish their requests."""
        self._port: Port | None = None
        self._url = ""
        self._model_name = ""

    def run(self) -> int:
        """Serve; return the exit status.

        Raises:
            ConfigError: The settings can't be served; no process is left running.
            UnsupportedModel: The model can't be served; likewise.
        """
        logs.configure("supervisor", level=self._config.log_level, format=self._config.log_format)
        # The first process of a container would ignore the signal until `_serve` handles it.
        signal.signal(signal.SIGTERM, _end_at_once)
        with contextlib.ExitStack() as owned:
            # Before the event loop exists: its signal handlers would delay Ctrl-C until a download
            # ends.
            plan = self._prepare(owned)
            return asyncio.run(self._serve(plan))

    async def _serve(self, plan: Plan) -> int:
        watcher = self._watcher = Watcher(
            self._parts, frozen_timeout_s=self._config.frozen_timeout_s
        )
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        restarts = Restarts(
            self,
            watcher.board,
            drain_timeout_s=self._config.drain_timeout_s,
            engine_start_timeout_s=plan.engine.start_timeout_s,
        )
        background = [
            asyncio.create_task(watcher.run(self._on_frozen)),
            asyncio.create_task(control.Control(restarts.restart).serve(control.listen())),
        ]
        try:
            await self._start_all(plan.inherited)
            await self._stop.wait()
            await self._drain()
        finally:
            for task in background:
                task.cancel()
            await self._kill_all()
        if self._failure is not None:
            self._tell(f"error: {self._failure}", self._failure, level="error")
            return 1
        self._say("stopped", "every process has ended")
        return 0

    # Start

    def _prepare(self, owned: contextlib.ExitStack) -> Plan:
        """Refuse invalid settings before a process starts.

        Args:
            owned: Gets the cleanup of acquired resources.
        """
        prepared = prepare(self._loaded, owned, self._say, may_download=True)
        self._parts, self._port = prepared.parts, prepared.plan.port
        self._model_name, self._url = prepared.plan.model_name, prepared.plan.port.url
        self._say("afferent", __version__)
        for who, what in prepared.notes:
            self._say(who, what)
        return prepared.plan

    async def _start_all(self, inherited: InheritedDescriptors) -> None:
        """Start the store first, then the engine's workers, which take longest."""
        size = f"{os.fstat(inherited.arena_fd).st_size / 2**20:,.0f} MiB"
        size += "" if self._config.arena_nbytes else ", as suits the memory there is"
        if self._config.preallocate_arena:
            start_s = time.monotonic()
            for _ in segment.allocate(inherited.arena_fd):
                await asyncio.sleep(0)  # let signal handlers run
                if self._stop.is_set():
                    return
            how = f"allocated in {time.monotonic() - start_s:.2f} s"
        else:
            how = "allocated as it is filled"
        self._say("arena", f"{size}; {how}")
        for part in self._parts.values():
            self._start(part)

    def _start(self, part: Part) -> None:
        """Start a process for a part that has none.

        Raises:
            OSError: Descriptors or memory are insufficient; nothing of it is left.
        """
        part.is_ready = False
        settings, fds, listener = part.settings(), part.fds, part.listener
        with contextlib.ExitStack() as opened:
            if part.port is not None:
                listener = listener or opened.enter_context(part.port.open())
                settings = msgspec.structs.replace(settings, listener_fd=listener.fileno())
                fds = (*fds, listener.fileno())
            child = spawn(
                part.name,
                part.module,
                settings,
                log=self._log_settings,
                fds=fds,
                env=part.env if part.is_engine else {**ONE_THREAD, **(part.env or {})},
                board=self._watcher.board.place if self._watcher else None,
            )
            opened.callback(child.discard)
            pidfd = os.pidfd_open(child.pid)
            opened.callback(os.close, pidfd)
            self._listen(part, child, pidfd)
            opened.pop_all()  # the part owns the listener now
        part.child, part.pidfd, part.listener = child, pidfd, listener

    # Implementation of `Host`, for `Restarts`

    @property
    def parts(self) -> Mapping[str, Part]:
        return self._parts

    @property
    def is_stopping(self) -> bool:
        return self._stop.is_set()

    def start_successor(self, part: Part) -> Part:
        """Start a second process like the part's, on its listening socket; the part stays as it is.

        Raises:
            OSError: Descriptors or memory are insufficient; nothing of it is left.
        """
        listener = part.listener
        if listener is not None:
            # Not socket.dup(): it makes the socket blocking, for the old process too.
            listener = socket.socket(fileno=os.dup(listener.fileno()))
        successor = dataclasses.replace(
            part,
            listener=listener,
            child=None,
            pidfd=-1,
            is_ready=False,
            last_said="",
        )
        try:
            self._start(successor)
        except BaseException:
            self._close_listener(successor)
            raise
        self._extra.append(successor)
        return successor

    def replace(self, part: Part, successor: Part) -> None:
        """Put the successor into the part's position; the part's process is not restarted."""
        self._extra.remove(successor)
        self._parts[part.name] = successor
        self._close_listener(part)
        if part.child is not None:
            self._extra.append(part)

    def discard(self, successor: Part) -> None:
        """Kill the successor's process, if it has one."""
        self._kill(successor)
        if successor in self._extra:
            self._extra.remove(successor)

    # Events

    def _listen(self, part: Part, child: Child, pidfd: int) -> None:
        """Forward this child's status and its death to its part.

        Raises:
            OSError: Memory is insufficient; no reader is left.
        """
        loop = asyncio.get_running_loop()
        loop.add_reader(child.status_fd, self._on_status, part, child)
        try:
            loop.add_reader(pidfd, self._on_death, part, child)
        except OSError:
            loop.remove_reader(child.status_fd)
            raise

    def _on_status(self, part: Part, child: Child) -> None:
        data = os.read(child.status_fd, 1 << 16)
        if not data:
            asyncio.get_running_loop().remove_reader(child.status_fd)
            return
        if self._stop.is_set():  # messages of a stopping process are noise
            return
        for line in data.splitlines():
            try:
                status = msgspec.json.decode(line, type=Status)
            except (ValueError, RecursionError):  # a compromised child writes anything
                log.warning("a report of a child is none", extra={"part": part.name})
                continue
            part.last_said = status.text
            self._say(part.name, f"ready: {status.text}" if status.ready else status.text)
            if status.ready:
                part.is_ready = part.has_been_ready = True
                part.num_failed_starts = 0
        if not self._announced and all(part.is_ready for part in self._parts.values()):
            self._announced = True
            took_s = time.monotonic() - self._started_s
            what = f'Serving "{self._model_name}" on {self._url}/v1'
            self._tell(
                f"\n{what} ({took_s:.1f} s). Ctrl-C stops it.\n",
                what,
                model=self._model_name,
                url=f"{self._url}/v1",
                took_s=round(took_s, 1),
            )

    def _on_frozen(self, part: Part) -> None:
        if part.child is not None:
            silent_s = self._config.frozen_timeout_s
            what = f"has not gone on for {silent_s:g} s; it is killed"
            self._say(part.name, what, level="warning")
            part.child.popen.kill()  # `_on_death` follows

    def _on_death(self, part: Part, child: Child) -> None:
        with contextlib.suppress(BlockingIOError):
            self._on_status(part, child)  # its last messages
        was_ready = part.is_ready
        code = self._reap(part, child)
        if self._stop.is_set():
            return
        if part in self._extra:  # Part compares by identity
            self._extra.remove(part)
            return
        if code == REFUSED and not part.has_been_ready:
            self._failure = part.last_said
            self._stop.set()
            return
        if not was_ready and code != LOST_PARTNERS:
            part.num_failed_starts += 1
            # A part that has run before may recover; the others are useful meanwhile.
            if part.num_failed_starts >= _MAX_FAILED_STARTS and not part.has_been_ready:
                self._failure = f"the {part.name} process can't be started; its log says why"
                self._stop.set()
                return
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        self._start_again(part, f"has ended ({how})")

    def _start_again(self, part: Part, why: str) -> None:
        self._say(part.name, f"{why}; starting it again", level="warning")
        task = asyncio.ensure_future(self._restart(part))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _restart(self, part: Part) -> None:
        failed = part.num_failed_starts
        await asyncio.sleep(_RESTART_FAILED_S * 2 ** min(failed - 1, 3) if failed else _RESTART_S)
        is_replaced = self._parts.get(part.name, part) is not part
        if self._stop.is_set() or part.child is not None or is_replaced:
            return
        try:
            self._start(part)
        except ConfigError as error:
            self._failure = f"{part.name} can't be started: {error}"
            self._stop.set()
        except OSError as error:  # out of descriptors or memory, perhaps temporarily
            part.num_failed_starts += 1
            if part.num_failed_starts >= _MAX_FAILED_STARTS and not part.has_been_ready:
                self._failure = f"{part.name} can't be started: {error}"
                self._stop.set()
            else:
                self._start_again(part, f"can't be started ({error.strerror})")

    def _on_hangup(self) -> None:
        """Stop as for SIGTERM; a terminal that closes may send it more than once."""
        if not self._stop.is_set():
            self._on_signal()

    def _on_signal(self) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._say("stopping", "finishing running requests; press Ctrl-C again to end at once")
            self._stop.set()
        else:
            for part in (*self._parts.values(), *self._extra):
                self._kill(part)

    # End

    async def _drain(self) -> None:
        """Let the frontends finish their requests, then end the others, the store last."""
        # While any process has the listening socket open, the kernel accepts connections into its
        # backlog.
        if self._port is not None:
            self._port.close()
        everybody = [*self._parts.values(), *self._extra]
        fronts = [part for part in everybody if part.port is not None]
        for part in fronts:
            self._close_listener(part)
        await self._terminate(fronts, self._config.drain_timeout_s + _TERMINATE_TIMEOUT_S)
        store = self._parts["store"]
        rest = [part for part in self._parts.values() if part not in (*fronts, store)]
        await self._terminate(rest, ENGINE_ENDS_S)
        await self._terminate([store], _TERMINATE_TIMEOUT_S)

    async def _terminate(self, parts: list[Part], timeout_s: float) -> None:
        for part in parts:
            if part.child is not None:
                part.child.popen.terminate()
        deadline = time.monotonic() + timeout_s
        while any(part.child is not None for part in parts) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def _kill_all(self) -> None:
        for part in (*self._parts.values(), *self._extra):
            self._kill(part)

    def _kill(self, part: Part) -> None:
        """End a child at once; its own children die with it."""
        if part.child is not None:
            part.child.popen.kill()
            self._reap(part, part.child)

    def _reap(self, part: Part, child: Child) -> int:
        """Return the exit status of an ended child, and close its descriptors."""
        code = child.popen.wait()
        if part.child is child:
            loop = asyncio.get_running_loop()
            loop.remove_reader(child.status_fd)
            loop.remove_reader(part.pidfd)
            os.close(part.pidfd)
            child.close()
            part.child, part.is_ready = None, False
            if not self._has_successor(part):
                self._close_listener(part)
            if self._watcher is not None and part not in self._extra:
                self._watcher.forget(part)
        return code

    def _has_successor(self, part: Part) -> bool:
        """Return whether another process has the part's socket and accepts from it."""
        others = (each for each in self._extra if each is not part and each.name == part.name)
        return any(each.listener is not None for each in others)

    def _close_listener(self, part: Part) -> None:
        if part.listener is not None:
            part.listener.close()
            part.listener = None

    def _say(self, who: str, what: str, *, level: str = "info") -> None:
        elapsed_s = time.monotonic() - self._started_s
        level = "warning" if who == "warning" else level
        self._tell(f"{elapsed_s:6.1f} s  {who:<11} {what}", what, level=level, part=who)

    def _tell(self, line: str, event: str, *, level: str = "info", **fields: object) -> None:
        """Print ``line``, or the event as JSON if logs are JSON, at any log level.

        A closed terminal must not keep the server from ending.
        """
        if self._config.log_format == "json":
            line = logs.json_line("supervisor", level, event, logger=log.name, **fields)
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)
