"""Connections of a simulated machine, and their failures.

Data arrive later, in order, perhaps in pieces, and only if there is space for them. Nothing is
guaranteed about the order between two connections. A connection may be cut, with the data in
transit. Before that it may be half open for a while: the data of one side do not arrive.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulator.watching import Watched

if TYPE_CHECKING:
    from tests.simulator.machine import Machine, Process

Chunk = tuple[bytes, tuple[Any, ...]]
"""Bytes, and the objects of the descriptors that come with the first byte."""


@dataclass(slots=True, kw_only=True)
class LinkRules:
    """Behaviour of connections.

    Attributes:
        delay_s: Least and largest delay of most transfers.
        slow_one_in: One of this many transfers takes a hundred times as long.
        split_one_in: One of this many transfers arrives in two pieces.
        capacity_nbytes: Bytes in transit before a sender has to wait.
    """

    delay_s: tuple[float, float] = (5e-6, 200e-6)
    slow_one_in: int = 50
    split_one_in: int = 20
    capacity_nbytes: int = 200_000


class End(Watched):
    """End of a connection."""

    def __init__(self, machine: Machine, name: str, rules: LinkRules, number: int) -> None:
        super().__init__()
        self.machine, self.name, self.rules, self.number = machine, name, rules, number
        self.peer_process: Process | None = None
        self.peer: End = self
        self.has_ended = self.has_reset = self.is_shut = False
        self.is_mute = False
        """Data sent here do not arrive, and no side is notified."""
        self._inbox: deque[Chunk] = deque()
        self._num_unread = 0  # includes bytes in transit
        self._last_s = 0.0

    # Reading

    @property
    def is_readable(self) -> bool:
        return bool(self._inbox) or self.has_ended or self.has_reset

    def read(self, limit: int) -> Chunk | None:
        """Return available data; ``None`` if there are none yet; empty at the end.

        Raises:
            ConnectionResetError: It was cut.
        """
        if not self._inbox:
            if self.has_reset:
                raise ConnectionResetError(104, "reset by peer")
            return (b"", ()) if self.has_ended else None
        found, extra = self._inbox.popleft()
        while self._inbox and len(found) < limit and not self._inbox[0][1]:
            found += self._inbox.popleft()[0]
        if len(found) > limit:
            self._inbox.appendleft((found[limit:], ()))
            found = found[:limit]
        self._num_unread -= len(found)
        self.peer.stir()  # there is space again
        return found, extra

    # Writing

    @property
    def room_nbytes(self) -> int:
        return max(self.rules.capacity_nbytes - self.peer._num_unread, 0)

    @property
    def is_broken(self) -> bool:
        """Whether no data can arrive any more, and the kernel knows it."""
        return self.has_reset or self.is_shut or self.peer.num_open == 0

    def write(self, data: bytes, extra: tuple[Any, ...] = ()) -> int:
        """Send as much as there is space for; return the number of bytes.

        Raises:
            BrokenPipeError: The other side is gone.
            ConnectionResetError: It was cut.
        """
        if self.has_reset:
            raise ConnectionResetError(104, "reset by peer")
        if self.is_broken:
            raise BrokenPipeError(32, "broken pipe")
        data = data[: self.room_nbytes]
        if data:
            self.machine.history.note(self.machine.now_s, self.name, data, self.peer.name)
            self.peer._num_unread += len(data)
            if not self.is_mute:
                self._send(data, extra)
        return len(data)

    def _send(self, data: bytes, extra: tuple[Any, ...]) -> None:
        rng, rules = self.machine.rng, self.rules
        # Data with a descriptor arrive in one piece.
        if len(data) > 1 and not extra and rng.random() * rules.split_one_in < 1.0:
            cut = 1 + int(rng.random() * (len(data) - 1))
            self._arrive_later(data[:cut], ())
            data = data[cut:]
        self._arrive_later(data, extra)

    def _arrive_later(self, data: bytes, extra: tuple[Any, ...]) -> None:
        """Schedule the arrival, after all earlier data."""
        rng, (least, most) = self.machine.rng, self.rules.delay_s
        delay_s = least + (most - least) * rng.random()
        if rng.random() * self.rules.slow_one_in < 1.0:
            delay_s *= 100.0
        at_s = max(self.machine.now_s + delay_s, self._last_s + 1e-9)
        self._last_s = at_s
        self.machine.after(at_s - self.machine.now_s, self.peer._arrive, data, extra)

    def _arrive(self, data: bytes, extra: tuple[Any, ...]) -> None:
        if self.has_reset or self.num_open == 0:
            return
        if data:
            self._inbox.append((data, extra))
        else:
            self.has_ended = True
        self.stir()

    # End

    def shut(self) -> None:
        """Stop sending and reading."""
        if not self.is_shut:
            self.is_shut = True
            if not self.peer.has_reset and not self.is_mute:
                self._arrive_later(b"", ())
            self.has_ended = True
            self.stir()

    def on_unused(self) -> None:
        """Close: the other side reads all data and then the end, or a reset if some were unread."""
        self.machine.links.pop(self.number, None)
        if self.peer.num_open == 0:
            return
        if self._inbox:
            self.machine.after(self.machine.wake_s(), self.peer.reset)
        elif not self.is_shut and not self.is_mute:
            self._arrive_later(b"", ())
        self.peer.stir()

    def reset(self) -> None:
        """Cut the connection: data in transit to this end are lost."""
        if not self.has_reset and self.num_open:
            self.has_reset = True
            self.stir()

    def cut(self) -> None:
        """Cut the connection for both sides."""
        self.machine.note(self.name, f"is cut off from {self.peer.name}")
        self.reset()
        self.peer.reset()


class Listener(Watched):
    """Listening socket. A process may inherit it: then it inherits the backlog, too."""

    def __init__(self, machine: Machine, path: str) -> None:
        super().__init__()
        self.machine, self.path = machine, path
        machine.listeners[path] = self
        self.backlog: deque[End] = deque()

    @property
    def is_readable(self) -> bool:
        return bool(self.backlog)

    def on_unused(self) -> None:
        del self.machine.listeners[self.path]
        for end in self.backlog:
            end.peer.reset()


def connect(machine: Machine, process: Process, path: str) -> End:
    """Return a connection to the process that listens at ``path``.

    Raises:
        ConnectionRefusedError: No process listens there.
    """
    listener = machine.listeners.get(path)
    if listener is None:
        raise ConnectionRefusedError(111, "refused")
    machine.num_links += 1
    number = 2 * machine.num_links
    rules = machine.rules
    here, there = End(machine, process.name, rules, number), End(machine, path, rules, number + 1)
    here.peer, there.peer = there, here
    there.peer_process = process
    there.num_open = 1  # the listener's, until it is accepted
    machine.links[number], machine.links[number + 1] = here, there
    listener.backlog.append(there)
    listener.stir()
    return here
