"""Lost wake-ups: a call that can continue at an instant continues then, not at a deadline.

Each call is followed from outside: sent, received by the daemon, answered, received by the client.
No step may take longer than messages take, unless a fault strikes one of the two processes in the
meantime. `check_nobody_waits_in_vain` finds calls that the daemon could answer and does not.
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
"""The longest delay of messages: some are a hundred times slower, and long ones are divided."""
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

    Invariants: it draws no random number and causes no event, so a seed's history stays the same.
    """

    current: Promptness

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._calls: dict[tuple[ClientId, int], _Call] = {}
        self._told: dict[tuple[ClientId, bytes], deque[_Call]] = defaultdict(deque)
        self._troubles: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._ends: dict[str, float] = {}
        self._unused: dict[Process, float] = {}
        self._lost: dict[DaemonStore, float] = {}

    # Faults

    def trouble(self, name: str, length_s: float) -> None:
        """Expect nothing of this process for so long; without a name, of no process."""
        now_s = self.machine.now_s
        self._troubles[name].append((now_s, now_s + length_s))

    def disconnected(self, name: str) -> None:
        """Note that a process has lost its connection; for ``DAEMON``, all processes have."""
        self._ends[name] = self.machine.now_s

    def is_troubled(self, names: tuple[str, ...], since_s: float) -> bool:
        """Return whether a fault has been active in one of them since then."""
        return any(
            start_s <= self.machine.now_s and end_s + SLACK_S >= since_s
            for name in names
            for start_s, end_s in self._troubles[name]
        )

    def check(self, process: Process, since_s: float, what: str) -> None:
        """Check that a process that could continue at ``since_s``, and does now, is not late."""
        took_s = self.machine.now_s - since_s
        if took_s <= SLACK_S or not process.is_alive or process.is_doomed:
            return
        if not self.is_troubled((process.name, DAEMON), since_s):
            self.machine.violate(f"prompt: {process.name} {what} {took_s:.2f} s ago")

    # The steps of a call

    def begins(self, client: ClientId, request: Request[Any]) -> None:
        call = _Call(type(request).__name__, _process(), self.machine.now_s)
        self._calls[client, request.seq] = call

    def tells(self, client: ClientId, request: Request[Any]) -> None:
        """The client has sent a request that gets no reply."""
        call = _Call(type(request).__name__, _process(), self.machine.now_s)
        self._told[client, encode(request)].append(call)

    def hears(self, client: ClientId, request: Request[Any]) -> None:
        """The daemon has received a request."""
        if request.seq == NO_REPLY:
            told = self._told.get((client, encode(request)))
            call = told.popleft() if told else None
        else:
            call = self._calls.get((client, request.seq))
        if call is not None:
            call.heard_s = self.machine.now_s
            self.check(call.process, call.start_s, f"was not heard with {call.verb}, sent")

    def answers(self, client: ClientId, seq: int) -> None:
        """The daemon has answered a request."""
        call = self._calls.get((client, seq))
        if call is not None:
            call.answered_s = self.machine.now_s

    def ends(self, client: ClientId, seq: int) -> None:
        """The client continues, with or without an answer."""
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

    # The steps of a new connection

    def unused(self, process: Process) -> None:
        """The process uses no memory of the arena any more."""
        self._unused[process] = self.machine.now_s

    def comes_back(self, process: Process) -> None:
        """The process begins to connect again, now that it uses no memory of the arena."""
        if (since_s := self._unused.pop(process, None)) is not None:
            self.check(process, since_s, "could have connected again")

    def loses(self, store: DaemonStore) -> None:
        """The store's client has given up its connection. Another one of the process, made after
        this one was closed, has not lost anything.
        """
        self._lost.setdefault(store, self.machine.now_s)

    def begins_again(self, store: DaemonStore) -> None:
        """The client begins to connect again."""
        if (since_s := self._lost.pop(store, None)) is not None:
            self.check(_process(), since_s, "gave its connection up")

    def check_lost(self, store: DaemonStore) -> None:
        """The client finds that it has no connection: it must have begun to connect again."""
        if (since_s := self._lost.get(store)) is not None:
            self.check(_process(), since_s, "gave its connection up, and looks for no other, since")


def _process() -> Process:
    return threads.current().process


@contextmanager
def followed() -> Iterator[None]:
    """Report what clients do to ``Promptness.current`` in this context."""
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
                seen.check_lost(self)
            raise
        finally:
            seen.ends(client, request.seq)

    def followed_lose(self: Any) -> None:
        if self._connection is not None:  # else its other thread may have begun again already
            Promptness.current.loses(self)
        lose(self)

    def followed_reconnect(self: Any) -> None:
        Promptness.current.begins_again(self)
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
