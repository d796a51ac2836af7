"""Lost wake-ups: a call that could go on at an instant goes on at that instant, not at a deadline.

The way of a call is followed from outside: when the client makes it, when the daemon hears it, when
the daemon answers it, when the client goes on. Each part takes no longer than messages take, unless
something goes wrong with one of the two processes meanwhile. What the daemon could answer and does
not is the oracle's (`check_nobody_waits_in_vain`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from afferent.errors import AfferentError
from afferent.store.arena import ArenaMap
from afferent.store.client import async_store
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.protocol.requests import NO_REPLY, Request
from afferent.types import ClientId, encode
from tests.simulator import threads
from tests.simulator.machine import Machine, Process

SLACK_S = 0.4
"""More than messages take: one is a hundred times as slow as most, and long ones go in pieces."""
DAEMON = "daemon"
EVERYBODY = ""

Replace = Callable[[Any, str, Any], None]


@dataclass(slots=True)
class _Call:
    verb: str
    process: Process
    start_s: float
    heard_s: float | None = None
    answered_s: float | None = None


class Promptness:
    """Follows the calls of all clients of one machine.

    Invariants: it draws no number and lets nothing happen, so a seed's history is the same with it.
    """

    current: Promptness

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._calls: dict[tuple[ClientId, int], _Call] = {}
        self._told: dict[tuple[ClientId, bytes], deque[_Call]] = defaultdict(deque)
        self._troubles: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._ends: dict[str, float] = {}
        self._unused: dict[Process, float] = {}
        self._lost: dict[Process, float] = {}

    # What goes wrong

    def trouble(self, name: str, length_s: float) -> None:
        """For so long, nothing is expected of this process, or of ``EVERYBODY``."""
        now_s = self.machine.now_s
        self._troubles[name].append((now_s, now_s + length_s))

    def disconnected(self, name: str) -> None:
        """The connection of this process to the daemon has ended; of ``DAEMON``: all have."""
        self._ends[name] = self.machine.now_s

    def is_troubled(self, names: tuple[str, ...], since_s: float) -> bool:
        """Whether something went wrong with one of them between then and now."""
        return any(
            start_s <= self.machine.now_s and end_s + SLACK_S >= since_s
            for name in names
            for start_s, end_s in self._troubles[name]
        )

    def check(self, process: Process, since_s: float, what: str) -> None:
        """A process could go on since then, and has gone on now."""
        took_s = self.machine.now_s - since_s
        if took_s <= SLACK_S or not process.is_alive or process.is_doomed:
            return
        if not self.is_troubled((process.name, DAEMON), since_s):
            self.machine.violate(f"prompt: {process.name} {what} {took_s:.2f} s ago")

    # The way of a call

    def begins(self, client: ClientId, request: Request[Any]) -> None:
        call = _Call(type(request).__name__, _process(), self.machine.now_s)
        self._calls[client, request.seq] = call

    def tells(self, client: ClientId, request: Request[Any]) -> None:
        """What is not answered is heard."""
        call = _Call(type(request).__name__, _process(), self.machine.now_s)
        self._told[client, encode(request)].append(call)

    def hears(self, client: ClientId, request: Request[Any]) -> None:
        """The daemon does."""
        if request.seq == NO_REPLY:
            told = self._told.get((client, encode(request)))
            call = told.popleft() if told else None
        else:
            call = self._calls.get((client, request.seq))
        if call is not None:
            call.heard_s = self.machine.now_s
            self.check(call.process, call.start_s, f"was not heard with {call.verb}, sent")

    def answers(self, client: ClientId, seq: int) -> None:
        """The daemon does."""
        call = self._calls.get((client, seq))
        if call is not None:
            call.answered_s = self.machine.now_s

    def ends(self, client: ClientId, seq: int) -> None:
        """The client goes on, whatever came of it."""
        call = self._calls.pop((client, seq), None)
        if call is None:
            return
        process, verb = call.process, call.verb
        ends = (self._ends.get(process.name, -1.0), self._ends.get(DAEMON, -1.0))
        if call.answered_s is not None:
            self.check(process, call.answered_s, f"had its answer to {verb}")
        elif max(ends) >= call.start_s:
            ended_s = min(end_s for end_s in ends if end_s >= call.start_s)
            self.check(process, ended_s, f"lost the connection for {verb}")
        elif call.heard_s is None:
            self.check(process, call.start_s, f"sent {verb}, which is not heard,")

    # The way back to the daemon

    def unused(self, process: Process) -> None:
        """It uses nothing of the arena any more."""
        self._unused[process] = self.machine.now_s

    def comes_back(self, process: Process) -> None:
        """It goes on because it uses nothing."""
        if (since_s := self._unused.pop(process, None)) is not None:
            self.check(process, since_s, "could have connected again")

    def loses(self, process: Process) -> None:
        """It gave its connection up."""
        self._lost.setdefault(process, self.machine.now_s)

    def begins_again(self, process: Process) -> None:
        """It looks for another."""
        if (since_s := self._lost.pop(process, None)) is not None:
            self.check(process, since_s, "gave its connection up")

    def check_lost(self, process: Process) -> None:
        """It finds that it has no connection: by now it looks for another."""
        if (since_s := self._lost.get(process)) is not None:
            self.check(process, since_s, "gave its connection up, and looks for no other, since")


def _process() -> Process:
    return threads.current().process


@contextmanager
def followed() -> Iterator[None]:
    """Within this, what clients do is reported to ``Promptness.current``."""
    before: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, new: Any) -> None:
        before.append((owner, name, vars(owner)[name]))
        setattr(owner, name, new)

    try:
        _follow_async(replace)
        _follow_blocking(replace)
        _follow_arena(replace)
        yield
    finally:
        for owner, name, old in reversed(before):
            setattr(owner, name, old)


def _follow_async(replace: Replace) -> None:
    call, tell = AsyncDaemonStore._call, AsyncDaemonStore._tell
    connect = async_store.connect

    async def followed_call(self: Any, what: Any) -> Any:
        client, seen = self.client_number, Promptness.current
        seen.begins(client, what.request)
        try:
            return await call(self, what)
        finally:
            seen.ends(client, what.request.seq)

    def followed_tell(self: Any, request: Any) -> None:
        if self._owner.is_here and self.is_open:
            Promptness.current.tells(self.client_number, request)
        tell(self, request)

    def followed_connect(*args: Any, **kwargs: Any) -> Any:
        Promptness.current.comes_back(_process())
        return connect(*args, **kwargs)

    replace(AsyncDaemonStore, "_call", followed_call)
    replace(AsyncDaemonStore, "_tell", followed_tell)
    replace(async_store, "connect", followed_connect)


def _follow_blocking(replace: Replace) -> None:
    exchange, lose = DaemonStore._exchange, DaemonStore._lose
    reconnect = DaemonStore._reconnect

    def followed_exchange(self: Any, request: Any, timeout_s: float | None) -> Any:
        client, seen = self.client_number, Promptness.current
        seen.begins(client, request)
        try:
            return exchange(self, request, timeout_s)
        except AfferentError:
            if self._connection is None:
                seen.check_lost(_process())
            raise
        finally:
            seen.ends(client, request.seq)

    def followed_lose(self: Any) -> None:
        Promptness.current.loses(_process())
        lose(self)

    def followed_reconnect(self: Any) -> None:
        Promptness.current.begins_again(_process())
        reconnect(self)

    replace(DaemonStore, "_exchange", followed_exchange)
    replace(DaemonStore, "_lose", followed_lose)
    replace(DaemonStore, "_reconnect", followed_reconnect)


def _follow_arena(replace: Replace) -> None:
    retire = ArenaMap.retire

    def followed_retire(self: Any, on_unused: Callable[[], object]) -> None:
        process, seen = _process(), Promptness.current

        def unused() -> None:
            seen.unused(process)
            on_unused()

        retire(self, unused)

    replace(ArenaMap, "retire", followed_retire)
