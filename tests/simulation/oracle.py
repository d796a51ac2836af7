"""The invariants of a run: of bytes, of the order of requests, and of evictions."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afferent.errors import StoreError
from afferent.store.protocol import requests
from afferent.store.protocol.requests import NO_REPLY
from afferent.store.state.jobs import CRASH_MEMORY_S, MAX_CRASHES
from afferent.store.state.machine import Replies, StoreState
from afferent.store.state.object import ObjectState
from afferent.types import ClientId, Handle, ObjectKind, Ticket
from tests.simulation.in_vain import Slow, check_every_call_waits, check_nobody_waits_in_vain
from tests.simulation.promptness import DAEMON, EVERYBODY, Promptness
from tests.simulator.descriptors import Memory
from tests.simulator.machine import Machine, Process

LINE_NBYTES = 64
NAMELESS = 2000
"""Content from this number on belongs to no key."""
_POISON = 0xDD


def key_of(number: int) -> bytes:
    return struct.pack("<QQQQ", number + 1, number + 1, 0, 0)


def number_of(key: bytes) -> int:
    return int(struct.unpack_from("<Q", key)[0]) - 1


class Use:
    """A process's use of a block, for reading or writing."""

    def __init__(
        self, oracle: Oracle, process: Process, lines: NDArray[Any], handle: Handle, what: int
    ) -> None:
        self.oracle, self.process, self.handle, self.what = oracle, process, handle, what
        self.writes = False
        self.lines: NDArray[Any] | None = lines
        self.start, self.end = handle.offset, handle.offset + handle.nbytes

    def write(self, first: int, last: int, source: int = 0) -> None:
        """Write a stamp into each of these lines."""
        if self.lines is None:
            return
        part = self.lines[first:last]
        part[:, 0], part[:, 1] = self.what, self.handle.generation
        part[:, 2], part[:, 3] = self.handle.segment, np.arange(first, last)
        part[:, 4], part[:, 5] = self.process.pid, source

    def check(self, first: int, last: int) -> int:
        """Check the stamps of these lines, and return the source that the last one names."""
        if self.lines is None:
            return 0
        part = self.lines[first:last]
        is_right = (
            (part[:, 0] == self.what).all()
            and (part[:, 1] == self.handle.generation).all()
            and (part[:, 2] == self.handle.segment).all()
            and (part[:, 3] == np.arange(first, last)).all()
        )
        if not is_right:
            verb = "wrote" if self.writes else "reads"
            self.oracle.violate(
                f"bytes: {self.process.name} {verb} {self.what} at {self.handle}, "
                f"and finds {part[:, :5].tolist()[:2]}"
            )
        return int(part[-1, 5]) if len(part) else 0

    def close(self) -> None:
        """End the use; `Oracle.on_death` ends the uses of a process that died."""
        self.lines = None
        if self.process.is_alive and not self.process.is_doomed:
            self.oracle.uses.pop(id(self), None)


class Oracle:
    """Checks each use of a block, and the daemon's state after each event."""

    def __init__(self, machine: Machine, memory: Memory, validates_every: int) -> None:
        self.machine, self.memory, self._every = machine, memory.data, validates_every
        self._has_memory = memory.has
        self.uses: dict[int, Use] = {}
        self.state: Observed | None = None
        self._num_seen = 0
        self.deaths: dict[tuple[int, int], list[float]] = defaultdict(list)
        self.prompt = Promptness(machine)

    def violate(self, what: str) -> None:
        self.machine.violate(what)

    # Events of processes

    def begin(
        self, process: Process, block: memoryview, handle: Handle, what: int, *, writes: bool
    ) -> Use:
        """Begin to read or write a block, until the use is closed."""
        lines = np.frombuffer(block, np.uint64).reshape(-1, LINE_NBYTES // 8)
        use = Use(self, process, lines, handle, what)
        use.writes = writes
        if not self._has_memory(use.start, use.end):
            self.violate(f"memory: {process.name} uses {handle}, of which pages are missing")
        for other in self.uses.values():
            overlaps = other.start < use.end and use.start < other.end
            if overlaps and other.process.is_alive and (writes or other.writes):
                self.violate(
                    f"two at once: {process.name} {'writes' if writes else 'reads'} {handle} while "
                    f"{other.process.name} {'writes' if other.writes else 'reads'} {other.handle}"
                )
        if writes:
            self._check_strikes(process, use)
            self._check_one_maker(use)
        self.uses[id(use)] = use
        return use

    def _check_one_maker(self, use: Use) -> None:
        state = self.state
        if use.what >= NAMELESS:
            return
        for other in self.uses.values():
            if other.what != use.what or not other.writes or state is None or other is use:
                continue
            if other.handle.segment != use.handle.segment or not other.process.is_alive:
                continue
            if state.is_being_made(other.handle) and state.is_being_made(use.handle):
                self.violate(f"makers: {other.process.name} and {use.process.name} make {use.what}")

    def _check_strikes(self, process: Process, use: Use) -> None:
        if self.state is None or process.name.startswith("tier") or use.what >= NAMELESS:
            return
        times = self.deaths[use.handle.segment, use.what]
        now_s = self.machine.now_s
        recent = [at_s for at_s in times if now_s - at_s < CRASH_MEMORY_S / 2]
        if len(recent) >= MAX_CRASHES:
            self.violate(
                f"strikes: {process.name} makes {use.what}, which has killed {len(recent)}"
            )

    def on_death(self, process: Process) -> None:
        """End the uses of a process, and count its death against the keys that it was making."""
        state = self.state
        if process.name == DAEMON:
            self.prompt.disconnected(DAEMON)
        for use in [use for use in self.uses.values() if use.process is process]:
            makes = use.writes and not process.name.startswith("tier")  # fetches do not count
            if makes and state is not None and state.is_being_made(use.handle):
                self.deaths[use.handle.segment, use.what].append(self.machine.now_s)
            del self.uses[id(use)]

    def made(self, handle: Handle, what: int) -> None:
        self.deaths.pop((handle.segment, what), None)

    # Events of the daemon

    def freed(self, segment: int, generation: int, start: int, end: int) -> None:
        """Check that no process uses a freed block, and overwrite the block."""
        for use in self.uses.values():
            if (
                use.process.is_alive
                and use.handle.segment == segment
                and use.handle.generation == generation
                and use.start < end
                and start < use.end
            ):
                verb = "writes" if use.writes else "reads"
                self.violate(f"freed: {use.process.name} {verb} {use.handle}, which is given back")
        self.memory[start:end] = _POISON

    def seen(self, state: Observed) -> None:
        """Validate the daemon's state after every n-th event."""
        self._num_seen += 1
        if self._num_seen % self._every == 0:
            self.validate(state)

    def validate(self, state: Observed) -> None:
        try:
            state.validate()
            check_nobody_waits_in_vain(state)
            check_every_call_waits(state, state.open_calls)
        except StoreError as error:
            self.violate(f"rules: {error.message}")


class Observed(StoreState):
    """The state of one daemon, checked after each event."""

    oracle: Oracle

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._blocks: dict[int, tuple[int, int]] = {}
        self._lines: dict[Hashable, list[tuple[ClientId, int]]] = defaultdict(list)
        self._places: dict[tuple[ClientId, int], Hashable] = {}
        self.oracle.state = self
        self.open_calls: set[Ticket] = set()
        self._slow = Slow()
        self._evicted: list[tuple[Handle, int]] = []
        self._evict, self.objects._evict = self.objects._evict, self._evicts  # type: ignore[method-assign]
        self._make_room, self.objects._make_room = self.objects._make_room, self._makes_room  # type: ignore[method-assign]

    def is_being_made(self, handle: Handle) -> bool:
        """Return whether a block is unsealed and not deleted."""
        found = self.objects._by_generation.get(handle.generation)
        if found is None or handle.segment != self.objects.segment:
            return False
        return found.state is ObjectState.CREATED

    def handle(self, client: ClientId, request: Any, *, now_s: float) -> Replies:
        self.oracle.prompt.hears(client, request)
        self._check_slow()
        known = self._clients.get(client)
        if request.seq != NO_REPLY and known is not None and known.connected:
            self.open_calls.add((client, request.seq))
        self._arrive(client, request)
        budget = self.objects.budget
        awaited = [kind for kind, number in budget._num_awaited.items() if number]
        before = [budget.unpromised_nbytes(kind) for kind in awaited]
        queued = budget.num_queued
        found = super().handle(client, request, now_s=now_s)
        if isinstance(request, requests.Evict):
            self._evicted.clear()
        replies = self._look(found)
        takes = isinstance(request, requests.Create | requests.Acquire | requests.Get)
        if takes and awaited and budget.num_queued >= queued:
            after = [budget.unpromised_nbytes(kind) for kind in awaited]
            if any(now < then for now, then in zip(after, before, strict=True)):
                self.oracle.violate(f"passed: {request} took what others wait for")
        return replies

    def look_again(self, *, now_s: float) -> Replies:
        self._check_slow()
        return self._look(super().look_again(now_s=now_s))

    def disconnect(self, client: ClientId, *, now_s: float) -> Replies:
        self._leave(client)
        return self._look(super().disconnect(client, now_s=now_s))

    def client_died(self, client: ClientId, *, now_s: float) -> Replies:
        self._leave(client)
        return self._look(super().client_died(client, now_s=now_s))

    # Order of requests

    def _arrive(self, client: ClientId, request: Any) -> None:
        match request:
            case requests.AcquirePermit(queue=True):
                what: Hashable = ("permit", request.semaphore, request.number)
            case requests.Reserve(queue=True):
                sizes = sorted((item.kind, item.nbytes) for item in request.items)
                what = ("room", tuple(sizes))
            case _:
                return
        share = self._share_of((client, request.request))
        line = (what, share.tenant)
        self._places[client, request.seq] = line
        self._lines[line].append((client, request.seq))

    def _leave(self, client: ClientId) -> None:
        self._check_slow()
        self.open_calls -= {call for call in self.open_calls if call[0] == client}
        for ticket in [ticket for ticket in self._places if ticket[0] == client]:
            self._lines[self._places.pop(ticket)].remove(ticket)

    def _look(self, replies: Replies) -> Replies:
        for client, reply in replies:
            self.open_calls.discard((client, reply.seq))
            self.oracle.prompt.answers(client, reply.seq)
            line = self._places.pop((client, reply.seq), None)
            if line is None:
                continue
            waiting = self._lines[line]
            if reply.failure is None and waiting[0] != (client, reply.seq):
                self.oracle.violate(
                    f"passed: {(client, reply.seq)} came before {waiting[0]} {line}"
                )
            waiting.remove((client, reply.seq))
        self._compare()
        self._check_slow()
        self.oracle.seen(self)
        return replies

    def _check_slow(self) -> None:
        """Check that steps that time or free memory has made possible are not overdue."""
        oracle, now_s = self.oracle, self.oracle.machine.now_s
        is_troubled = oracle.prompt.is_troubled((DAEMON, EVERYBODY), now_s)
        for what, waits_s in self._slow.overdue(self, now_s, is_troubled=is_troubled):
            oracle.violate(f"prompt: {what} since {waits_s:.2f} s")

    # Evictions

    def _evicts(self, region: Any, items: Any) -> None:
        self._evicted += [(item.handle, item.block_nbytes) for item in items]
        self._evict(region, items)

    def _makes_room(self, kind: ObjectKind, nbytes: int) -> int | None:
        free_nbytes = self.objects.regions[kind].allocator.largest_free_nbytes
        offset = self._make_room(kind, nbytes)
        if offset is not None and free_nbytes >= nbytes:
            self.oracle.violate(f"waste: {nbytes} bytes of {kind} were free, and more is evicted")
        return offset

    def _check_waste(self, now: dict[int, tuple[int, int]]) -> None:
        """Check that each evicted block made space for a new object, or was evicted on request."""
        evicted, self._evicted = self._evicted, []
        created = [block for generation, block in now.items() if generation not in self._blocks]
        for handle, nbytes in evicted:
            is_used = any(
                start < handle.offset + nbytes and handle.offset < start + length
                for start, length in created
            )
            if not is_used and handle.generation not in now:  # else: restored
                self.oracle.violate(f"waste: {handle} is evicted in vain")

    # Freed blocks

    def _compare(self) -> None:
        """Report the freed bytes of blocks that were deleted or trimmed."""
        now = {
            generation: (item.handle.offset, item.block_nbytes)
            for generation, item in self.objects._by_generation.items()
        }
        if self._evicted:
            self._check_waste(now)
        if now == self._blocks:
            return
        for generation, (start, nbytes) in self._blocks.items():
            kept = now.get(generation, (start, 0))[1]
            if kept < nbytes:
                segment = self.objects.segment
                self.oracle.freed(segment, generation, start + kept, start + nbytes)
        self._blocks = now
