"""What must never be seen: who uses which bytes, who comes before whom, and what bytes say."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afferent.errors import StoreError
from afferent.store.protocol import requests
from afferent.store.state.allocator import round_up
from afferent.store.state.jobs import CRASH_MEMORY_S, MAX_CRASHES, Job
from afferent.store.state.machine import Replies, StoreState
from afferent.store.state.object import ObjectState
from afferent.testing.simulation.descriptors import Memory
from afferent.testing.simulation.machine import Machine, Process
from afferent.types import ClientId, Handle

LINE_NBYTES = 64
NAMELESS = 2000
"""From here on what a block has in it is no key's."""
_POISON = 0xDD


def key_of(number: int) -> bytes:
    return struct.pack("<QQQQ", number + 1, number + 1, 0, 0)


def number_of(key: bytes) -> int:
    return int(struct.unpack_from("<Q", key)[0]) - 1


class Use:
    """A process that reads or writes a block, for as long as it does."""

    def __init__(
        self, oracle: Oracle, process: Process, lines: NDArray[Any], handle: Handle, what: int
    ) -> None:
        self.oracle, self.process, self.handle, self.what = oracle, process, handle, what
        self.writes = False
        self.lines: NDArray[Any] | None = lines
        self.start, self.end = handle.offset, handle.offset + handle.nbytes

    def write(self, first: int, last: int, source: int = 0) -> None:
        """Stamp these lines."""
        if self.lines is None:
            return
        part = self.lines[first:last]
        part[:, 0], part[:, 1] = self.what, self.handle.generation
        part[:, 2], part[:, 3] = self.handle.segment, np.arange(first, last)
        part[:, 4], part[:, 5] = self.process.pid, source

    def check(self, first: int, last: int) -> int:
        """Whether these lines say what they should; what the last one was computed from."""
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
        """Nothing is looked at any more; what a process left by dying is `Oracle.on_death`'s."""
        self.lines = None
        if self.process.is_alive and not self.process.is_doomed:
            self.oracle.uses.pop(id(self), None)


class Oracle:
    """Looks at what every process does, and at the daemon's state after each event."""

    def __init__(self, machine: Machine, memory: Memory, validates_every: int) -> None:
        self.machine, self.memory, self._every = machine, memory.data, validates_every
        self._has_memory = memory.has
        self.uses: dict[int, Use] = {}
        self.state: Observed | None = None
        self._num_seen = 0
        self.deaths: dict[tuple[int, int], list[float]] = defaultdict(list)

    def violate(self, what: str) -> None:
        self.machine.violate(what)

    # What processes do

    def begin(
        self, process: Process, block: memoryview, handle: Handle, what: int, *, writes: bool
    ) -> Use:
        """A process looks at a block, or writes it, until the use is closed."""
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
        """Its uses end; what it was making has killed a maker."""
        state = self.state
        for use in [use for use in self.uses.values() if use.process is process]:
            makes = use.writes and not process.name.startswith("tier")  # who fetches makes nothing
            if makes and state is not None and state.is_being_made(use.handle):
                self.deaths[use.handle.segment, use.what].append(self.machine.now_s)
            del self.uses[id(use)]

    def made(self, handle: Handle, what: int) -> None:
        self.deaths.pop((handle.segment, what), None)

    # What the daemon does

    def freed(self, segment: int, generation: int, start: int, end: int) -> None:
        """A block is given back: nobody may look at it any more."""
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
        """After each event of the daemon."""
        self._num_seen += 1
        if self._num_seen % self._every == 0:
            self.validate(state)

    def validate(self, state: StoreState) -> None:
        try:
            state.validate()
            check_nobody_waits_in_vain(state)
        except StoreError as error:
            self.violate(f"rules: {error.message}")


def check_nobody_waits_in_vain(state: StoreState) -> None:
    """What could be done now has been done.

    Raises:
        StoreError: It has not.
    """
    objects, flights, budget = state.objects, state.flights, state.objects.budget
    unplaced = set(flights.unplaced_keys())
    for key in flights.waiters._waiting:
        if objects.find(key) is None and flights.jobs.find(key) is None and key not in unplaced:
            raise StoreError("what is waited for is made by nobody")
    for job in flights.jobs:
        if job.worker is None and not flights.waiters.is_awaited(job.key):
            raise StoreError("a job waits for a worker, and nobody for the job")
    waiting = [(entry.new.kind, entry.new.nbytes) for entry in _unplaced_jobs(state)]
    waiting += [
        (create.items[0].kind, create.items[0].nbytes)
        for _, create in state._pending
        if len(create.items) == 1
    ]
    for kind, nbytes in waiting:
        region = objects.regions[kind]
        fits = region.allocator.largest_free_nbytes >= round_up(nbytes)
        if fits or region.choose_victims(nbytes) is not None:
            raise StoreError("what has its bytes and an extent still waits for one")
    first = budget._next(set())
    # Without asking for more memory, which may be there by now, and which is not asked for yet.
    if first is not None and all(
        nbytes <= budget.unpromised_nbytes(kind) for kind, nbytes in first.amounts.items()
    ):
        raise StoreError("who is next has room, and still waits for it")


def _unplaced_jobs(state: StoreState) -> list[Job]:
    jobs = state.flights.jobs
    return [e for e in state.flights._unplaced if isinstance(e, Job) and jobs.get(e.id) is e]


class Observed(StoreState):
    """The state of one daemon, looked at after each event."""

    oracle: Oracle

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._blocks: dict[int, tuple[int, int]] = {}
        self._lines: dict[Hashable, list[tuple[ClientId, int]]] = defaultdict(list)
        self._places: dict[tuple[ClientId, int], Hashable] = {}
        self.oracle.state = self
        self._top = 1

    def is_being_made(self, handle: Handle) -> bool:
        """Whether what is written there can be found by its key."""
        found = self.objects._by_generation.get(handle.generation)
        if found is None or handle.segment != self.objects.segment:
            return False
        return found.state is ObjectState.CREATED

    def handle(self, client: ClientId, request: Any, *, now_s: float) -> Replies:
        self._arrive(client, request)
        budget = self.objects.budget
        awaited = [kind for kind, number in budget._num_awaited.items() if number]
        before = [budget.unpromised_nbytes(kind) for kind in awaited]
        queued = budget.num_queued
        replies = self._look(super().handle(client, request, now_s=now_s))
        takes = isinstance(request, requests.Create | requests.Acquire | requests.Get)
        if takes and awaited and budget.num_queued >= queued:
            after = [budget.unpromised_nbytes(kind) for kind in awaited]
            if any(now < then for now, then in zip(after, before, strict=True)):
                self.oracle.violate(f"passed: {request} took what others wait for")
        return replies

    def look_again(self, *, now_s: float) -> Replies:
        return self._look(super().look_again(now_s=now_s))

    def disconnect(self, client: ClientId, *, now_s: float) -> Replies:
        self._leave(client)
        return self._look(super().disconnect(client, now_s=now_s))

    def client_died(self, client: ClientId, *, now_s: float) -> Replies:
        self._leave(client)
        return self._look(super().client_died(client, now_s=now_s))

    # Who comes before whom

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
        for ticket in [ticket for ticket in self._places if ticket[0] == client]:
            self._lines[self._places.pop(ticket)].remove(ticket)

    def _look(self, replies: Replies) -> Replies:
        for client, reply in replies:
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
        self.oracle.seen(self)
        return replies

    # What is where

    def _compare(self) -> None:
        """Tell of blocks that have been given back, as far as they were."""
        now = {
            generation: (item.handle.offset, item.block_nbytes)
            for generation, item in self.objects._by_generation.items()
        }
        if now == self._blocks:
            return
        for generation, (start, nbytes) in self._blocks.items():
            kept = now.get(generation, (start, 0))[1]
            if kept < nbytes:
                segment = self.objects.segment
                self.oracle.freed(segment, generation, start + kept, start + nbytes)
        self._blocks = now
