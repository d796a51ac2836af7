"""Random requests of random clients in any order, and the invariants that always hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from afferent.admission.shares import Share
from afferent.store.protocol import requests
from afferent.store.protocol.items import Claim, Fetch, Find, Join, Queue, SealItem, Wanted
from afferent.store.protocol.requests import Request
from afferent.store.protocol.results import Hit, InFlight, Made, Order, Outcome, Owner, Scheduled
from afferent.store.state.key_state import TRANSITIONS, KeyState
from afferent.store.state.machine import Replies, StoreState
from afferent.store.state.object import ObjectState
from afferent.types import ContentKey, CreateItem, Failure, Handle, ObjectKind, ReserveItem
from tests.examples import examples

CAPACITY_NBYTES = 4096
SHARES = {ObjectKind.RAW: 0.25, ObjectKind.FEATURES: 0.5, ObjectKind.EMBEDDINGS: 0.25}
KEYS = [bytes([n]) * 32 for n in range(3)]

KINDS = st.sampled_from([ObjectKind.RAW, ObjectKind.FEATURES])
SLOTS = st.integers(0, 3)
REQUESTS = st.sampled_from("xy")
SIZES = st.one_of(st.integers(1, 300), st.integers(1, 300), st.integers(300, 2100))
KEY = st.sampled_from(KEYS)
PICKS = st.lists(st.integers(0, 30), min_size=1, max_size=3)
_MOST_STEPS = 3
"""Most steps of a key in one verb."""


def reachable(start: KeyState) -> set[KeyState]:
    """Return the states that a key may be in after one verb.

    The way leads through ``absent`` only for an object that is evicted for another one: a key that
    a request waits for is never absent.
    """
    found, latest = {start}, {start}
    for _ in range(_MOST_STEPS):
        onwards = {each for each in latest if each is not KeyState.ABSENT or start in _MAY_BEGIN}
        latest = {after for each in onwards for after in TRANSITIONS[each]}
        found |= latest
    return found


_MAY_BEGIN = {KeyState.ABSENT, KeyState.SEALED, KeyState.QUARANTINED}
REACHABLE = {state: reachable(state) for state in KeyState}
FAILURES = st.none() | st.just(Failure("invalid_media", "bad"))


class Anything(RuleBasedStateMachine):
    """Four slots, each with a client that may disconnect, die, and be replaced by another."""

    def __init__(self) -> None:
        super().__init__()
        self.state = self.empty_state()
        self.now_s = 0.0
        self.next_client = 1
        self.next_seq = 1
        self.places: list[int] = []
        self.lost: set[int] = set()
        self.refused: set[int] = set()
        self.open: dict[tuple[int, int], Request] = {}
        self.handles: list[Handle] = [Handle(1, 64, 10, 999), Handle(2, 0, 10, 1)]
        self.orders: list[tuple[int, int]] = [(1, 99)]
        self.tickets: list[int] = [0]
        self.key_states = dict.fromkeys(map(ContentKey, KEYS), KeyState.ABSENT)
        self.joined: list[tuple[int, str, bytes]] = []  # the keys that each lease may wait for
        for _ in range(4):
            self.places.append(self.join())

    def empty_state(self) -> StoreState:
        return StoreState(CAPACITY_NBYTES, segment=1, shares=SHARES)

    def join(self) -> int:
        client = self.next_client
        self.next_client += 1
        self.state.connect(client, name="c", pid=client)
        return client

    # Messages

    def send(self, slot: int, kind: Any, *arguments: Any) -> None:
        client, seq = self.places[slot], self.next_seq
        self.next_seq += 1
        request = kind(seq, *arguments)
        self.open[client, seq] = request
        self.deliver(self.state.handle(client, request, now_s=self.now_s))
        waits = isinstance(
            request,
            requests.Wait
            | requests.Create
            | requests.Reserve
            | requests.AcquirePermit
            | requests.Take,
        )
        assert waits or (client, seq) not in self.open, "this is answered at once"

    def deliver(self, replies: Replies) -> None:
        for client, reply in replies:
            assert client in self.places, "only who is connected is answered"
            request = self.open.pop((client, reply.seq))  # each call is answered once
            if reply.failure is not None:
                self.refused.add(reply.seq)
            else:
                self.note(client, request, reply.result)

    def note(self, client: int, request: Request, result: bytes) -> None:
        def read(kind: Any) -> Any:
            return msgspec.msgpack.decode(result, type=kind)

        match request:
            case requests.Acquire() | requests.Wait():
                for outcome in read(list[Outcome]):
                    if isinstance(outcome, Hit | Made | Owner):
                        self.handles.append(outcome.handle)
                        self.is_held(client, request.request, outcome)
                if isinstance(request, requests.Acquire):
                    outcomes = read(list[Outcome])
                    self.joined += [
                        (client, request.request, item.key)
                        for item, outcome in zip(request.items, outcomes, strict=True)
                        if isinstance(outcome, InFlight | Scheduled)
                    ]
            case requests.Create():
                self.handles += read(list[Handle])
            case requests.Take():
                order = read(Order)
                self.orders.append((client, order.job))
                self.handles.append(order.target)
            case _:
                pass

    def is_held(self, client: int, request: str, outcome: Hit | Made | Owner) -> None:
        """The request that is given a handle is the writer of the object, or has it pinned."""
        item = self.state.objects.resolve(outcome.handle)
        if isinstance(outcome, Owner):
            assert item.writer == (client, request)
        else:
            assert item.pins.get((client, request), 0) > 0

    def pick(self, which: list[int]) -> list[Handle]:
        """Choose handles, mostly of existing objects, and some old ones."""
        there = [item.handle for item in self.state.objects][::-1]
        handles = [*there, *self.handles[-2:]]
        return [handles[n % len(handles)] for n in which]

    def request_of(self, handle: Handle, slot: int) -> tuple[int, str]:
        """Return the slot and name of a request that knows it has the object, or any other."""
        for item in self.state.objects:
            if item.handle.generation == handle.generation:
                for lease in [*item.pins, *([item.writer] if item.writer else [])]:
                    client, request = lease
                    if client not in self.places or not isinstance(request, str):
                        continue
                    if not self.is_untold((client, request), handle):
                        return self.places.index(client), request
        return slot, "nobody"

    def is_untold(self, lease: tuple[int, str], handle: Handle) -> bool:
        """Return whether a request was given an object and has not been notified."""
        interests = self.state.flights.waiters._interests.get(lease, {}).values()
        told = [known.outcome for known in interests]
        given = [each.handle for each in told if isinstance(each, Hit | Made | Owner)]
        return handle.generation in [other.generation for other in given]

    # Requests of clients

    @rule(
        slot=SLOTS,
        request=REQUESTS,
        kind=KINDS,
        keys=st.lists(KEY, max_size=3),
        nbytes=SIZES,
        how=st.sampled_from(["find", "join", "claim", "queue", "fetch"]),
        sources=PICKS,
        cost_us=st.sampled_from([1, 20_000, 2_000_000]),
    )
    def acquire(
        self,
        slot: int,
        request: str,
        kind: ObjectKind,
        keys: list[bytes],
        nbytes: int,
        how: str,
        sources: list[int],
        cost_us: int,
    ) -> None:
        inputs = self.pick(sources[1:])
        make_item: dict[str, Callable[[bytes], Wanted]] = {
            "find": Find,
            "join": Join,
            "claim": lambda key: Claim(key, kind, nbytes),
            "queue": lambda key: Queue(key, kind, nbytes, inputs, b"how", cost_us),
            "fetch": lambda key: Fetch(key, kind, nbytes, cost_us),
        }
        items = [make_item[how](key) for key in keys]
        self.send(slot, requests.Acquire, request, items)

    @rule(slot=SLOTS, request=REQUESTS, keys=st.lists(KEY, max_size=3))
    def wait(self, slot: int, request: str, keys: list[bytes]) -> None:
        self.send(slot, requests.Wait, request, keys)

    @precondition(lambda self: self.joined)
    @rule(which=st.integers(0, 5), count=st.integers(1, 3))
    def wait_for_what_was_joined(self, which: int, count: int) -> None:
        client, request, _ = self.joined[-1 - which % len(self.joined)]
        keys = [key for *who, key in self.joined if who == [client, request]]
        self.send(
            self.places.index(client), requests.Wait, request, list(dict.fromkeys(keys))[-count:]
        )

    @rule(
        slot=SLOTS,
        request=REQUESTS,
        kind=KINDS,
        sizes=st.lists(SIZES, max_size=3),
        key=st.none() | KEY,
    )
    def create(
        self, slot: int, request: str, kind: ObjectKind, sizes: list[int], key: bytes | None
    ) -> None:
        items = [
            CreateItem(kind, nbytes, key if n == 0 else None) for n, nbytes in enumerate(sizes)
        ]
        self.send(slot, requests.Create, request, items)

    @rule(
        slot=SLOTS,
        which=PICKS,
        part=st.floats(0.1, 1.1),
        sources=st.lists(st.integers(0, 9), max_size=1),
    )
    def seal(self, slot: int, which: list[int], part: float, sources: list[int]) -> None:
        """Seal as the first handle's writer, or as any request."""
        handles = self.pick(which)
        items = [
            SealItem(h, max(1, int(h.nbytes * part)), self.pick(sources) if sources else [])
            for h in handles
        ]
        slot, request = self.request_of(handles[0], slot)
        self.send(slot, requests.Seal, request, items)

    @rule(slot=SLOTS, which=PICKS, failure=FAILURES)
    def abort(self, slot: int, which: list[int], failure: Failure | None) -> None:
        handles = self.pick(which)
        slot, request = self.request_of(handles[0], slot)
        self.send(slot, requests.Abort, request, handles, failure)

    @rule(slot=SLOTS, request=REQUESTS, which=PICKS)
    def get(self, slot: int, request: str, which: list[int]) -> None:
        self.send(slot, requests.Get, request, self.pick(which))

    @rule(slot=SLOTS, request=REQUESTS, which=PICKS, others=st.lists(st.integers(0, 5), max_size=3))
    def get_for_others(self, slot: int, request: str, which: list[int], others: list[int]) -> None:
        """Pin for connected clients, for a disconnected one, and for an id that is not in use."""
        numbers = [*self.places, *sorted(self.lost)[:1], self.next_client]
        also_for = [numbers[n % len(numbers)] for n in others]
        before, handles, seq = self.pins(), self.pick(which), self.next_seq
        self.send(slot, requests.Get, request, handles, also_for)
        if seq not in self.refused:
            leases = [(client, request) for client in [self.places[slot], *also_for]]
            before.update((lease, handle.generation) for lease in leases for handle in handles)
        assert self.pins() == before, "all, and once for each, or nothing"

    def pins(self) -> Counter[tuple[object, int]]:
        """Return the number of pins that each lease has on each object."""
        return Counter(
            {
                (lease, item.handle.generation): count
                for item in self.state.objects
                for lease, count in item.pins.items()
            }
        )

    @rule(slot=SLOTS, request=REQUESTS, which=st.none() | PICKS)
    def release(self, slot: int, request: str, which: list[int] | None) -> None:
        lease = (self.places[slot], request)
        if which is not None:  # a client must not release an object that it was not notified of
            known = [handle for handle in self.pick(which) if not self.is_untold(lease, handle)]
            self.send(slot, requests.Release, request, known)
            return
        self.send(slot, requests.Release, request, None)
        assert all(item.writer != lease and lease not in item.pins for item in self.state.objects)

    @rule(slot=SLOTS, request=REQUESTS, key=KEY, nbytes=SIZES, is_read=st.booleans())
    def acquire_by_a_job(
        self, slot: int, request: str, key: bytes, nbytes: int, is_read: bool
    ) -> None:
        sealed = [item.handle for item in self.state.objects if item.state is ObjectState.SEALED]
        inputs = sealed[-1:] if is_read else []
        item = Queue(key, ObjectKind.FEATURES, nbytes, inputs, b"how")
        self.send(slot, requests.Acquire, request, [item])

    @rule(slot=SLOTS, request=REQUESTS, key=KEY, nbytes=SIZES, make_job=st.booleans())
    def acquire_under_a_reservation(
        self, slot: int, request: str, key: bytes, nbytes: int, make_job: bool
    ) -> None:
        self.send(
            slot, requests.Reserve, request, [ReserveItem(ObjectKind.FEATURES, nbytes)], False
        )
        kind = ObjectKind.FEATURES
        item = Queue(key, kind, nbytes, [], b"how") if make_job else Claim(key, kind, nbytes)
        self.send(slot, requests.Acquire, request, [item])

    @rule(slot=SLOTS, request=REQUESTS, sizes=st.lists(SIZES, min_size=1, max_size=2))
    def create_under_a_reservation(self, slot: int, request: str, sizes: list[int]) -> None:
        kind = ObjectKind.FEATURES
        reserved = [ReserveItem(kind, nbytes) for nbytes in sizes]
        self.send(slot, requests.Reserve, request, reserved, False)
        self.send(slot, requests.Create, request, [CreateItem(kind, nbytes) for nbytes in sizes])

    @rule(slot=SLOTS, which=PICKS)
    def release_what_is_held(self, slot: int, which: list[int]) -> None:
        handles = self.pick(which)[:1]
        slot, request = self.request_of(handles[0], slot)
        self.send(slot, requests.Release, request, handles)

    @rule(
        slot=SLOTS,
        request=REQUESTS,
        kind=KINDS,
        nbytes=SIZES,
        both=st.booleans(),
        queue=st.booleans(),
    )
    def reserve(
        self, slot: int, request: str, kind: ObjectKind, nbytes: int, both: bool, queue: bool
    ) -> None:
        items = [ReserveItem(kind, nbytes)]
        if both:
            items.append(ReserveItem(ObjectKind.RAW, 100))
        self.tickets.append(self.next_seq)
        self.send(slot, requests.Reserve, request, items, queue)

    @rule(slot=SLOTS, request=REQUESTS, kind=KINDS, nbytes=SIZES, which=st.integers(0, 5))
    def unreserve(self, slot: int, request: str, kind: ObjectKind, nbytes: int, which: int) -> None:
        ticket = self.tickets[-1 - which % len(self.tickets)]
        self.send(slot, requests.Unreserve, request, [ReserveItem(kind, nbytes)], ticket)

    @rule(
        slot=SLOTS,
        request=REQUESTS,
        name=st.sampled_from(["preprocess", "t/a"]),
        queue=st.booleans(),
        number=st.integers(1, 4),
    )
    def enter(self, slot: int, request: str, name: str, queue: bool, number: int) -> None:
        self.send(slot, requests.AcquirePermit, request, name, 3, queue, number)

    @rule(slot=SLOTS, request=REQUESTS, share=st.builds(Share, st.sampled_from(["", "a", "b"])))
    def introduce(self, slot: int, request: str, share: Share) -> None:
        self.send(slot, requests.Introduce, request, share)

    @rule(slot=SLOTS, request=REQUESTS, name=st.sampled_from(["preprocess", "t/a"]))
    def leave(self, slot: int, request: str, name: str) -> None:
        self.send(slot, requests.ReleasePermit, request, name)

    @rule(slot=SLOTS, request=REQUESTS, key=KEY)
    def enter_and_acquire(self, slot: int, request: str, key: bytes) -> None:
        """Acquire as a request of the server does: with a permit and a reservation."""
        self.send(slot, requests.AcquirePermit, request, "preprocess", 3, False)
        self.acquire_under_a_reservation(slot, request, key, 100, True)

    @rule(slot=SLOTS, keys=st.lists(KEY, max_size=2))
    def delete(self, slot: int, keys: list[bytes]) -> None:
        self.send(slot, requests.Delete, keys)

    @rule(slot=SLOTS, kind=KINDS, nbytes=st.none() | SIZES)
    def evict(self, slot: int, kind: ObjectKind, nbytes: int | None) -> None:
        self.send(slot, requests.Evict, kind, nbytes)

    @rule(slot=SLOTS)
    def ask(self, slot: int) -> None:
        self.send(slot, requests.Stat)
        self.send(slot, requests.Clients)
        self.send(slot, requests.List, None, 10)

    @rule(slot=SLOTS, role=st.sampled_from(["make", "make", "fetch"]))
    def take(self, slot: int, role: str) -> None:
        self.send(slot, requests.Take, role)

    @precondition(lambda self: len(self.state.flights.jobs))
    @rule(slot=SLOTS)
    def take_a_job(self, slot: int) -> None:
        self.send(slot, requests.Take)

    @precondition(lambda self: any(job.worker in self.places for job in self.state.flights.jobs))
    @rule(part=st.floats(0.1, 1.0), failure=FAILURES)
    def finish_a_job(self, part: float, failure: Failure | None) -> None:
        job = next(job for job in self.state.flights.jobs if job.worker in self.places)
        used = max(1, int(job.new.nbytes * part))
        self.send(self.places.index(job.worker), requests.Finish, job.id, used, failure, [])

    @rule(slot=SLOTS, which=st.integers(0, 4), used=st.integers(0, 400), failure=FAILURES)
    def finish(self, slot: int, which: int, used: int, failure: Failure | None) -> None:
        client, job = self.orders[-1 - which % len(self.orders)]
        if client in self.places:
            slot = self.places.index(client)
        self.send(slot, requests.Finish, job, used, failure, [])

    # Clients that end

    @precondition(lambda self: any(job.worker in self.places for job in self.state.flights.jobs))
    @rule()
    def a_worker_dies(self) -> None:
        """Kill a worker that has a job."""
        workers = [job.worker for job in self.state.flights.jobs if job.worker in self.places]
        self.die(self.places.index(workers[0]), 0.0)

    @rule(slot=SLOTS, forward_s=st.sampled_from([0.0, 0.0, 61.0]))
    def die(self, slot: int, forward_s: float) -> None:
        self.now_s += forward_s
        client = self.places[slot]
        self.places[slot] = self.join()
        self.gone(client)
        self.deliver(self.state.client_died(client, now_s=self.now_s))
        assert all(lease[0] != client for item in self.state.objects for lease in item.pins)

    @rule(slot=SLOTS)
    def lose(self, slot: int) -> None:
        client = self.places[slot]
        self.places[slot] = self.join()
        self.gone(client)
        self.lost.add(client)
        self.deliver(self.state.disconnect(client, now_s=self.now_s))
        assert self.state.handle(client, requests.Stat(1), now_s=self.now_s) == []

    @precondition(lambda self: self.lost)
    @rule()
    def lost_dies(self) -> None:
        client = self.lost.pop()
        self.deliver(self.state.client_died(client, now_s=self.now_s))

    def gone(self, client: int) -> None:
        self.open = {call: request for call, request in self.open.items() if call[0] != client}
        self.joined = [joined for joined in self.joined if joined[0] != client]

    # Invariants

    @invariant()
    def is_valid(self) -> None:
        self.state.validate()

    @invariant()
    def keys_move_along_the_table(self) -> None:
        """Check that each key has moved along the table of transitions."""
        flights = self.state.flights
        for key in map(ContentKey, KEYS):
            before, after = self.key_states[key], flights.state_of(key, now_s=self.now_s)
            assert after in REACHABLE[before], f"{before} to {after}"
            self.key_states[key] = after

    @invariant()
    def one_maker_for_a_key(self) -> None:
        being_made = [
            item.key
            for item in self.state.objects
            if item.key is not None and item.state is not ObjectState.PENDING_DELETION
        ]
        assert len(being_made) == len(set(being_made))

    @invariant()
    def no_permit_has_more_than_its_limit(self) -> None:
        for slot in self.state.semaphores._semaphores.values():
            assert slot.num_held <= 3

    @invariant()
    def a_place_of_the_gone_stands_for_a_job_that_runs(self) -> None:
        running = {(job.id, job.worker) for job in self.state.flights.jobs}
        for _, work, _ in self.state.semaphores._lingering:
            assert work & running

    @invariant()
    def whoever_waits_waits_for_somebody(self) -> None:
        """A `Wait` is open only while one of its keys is being made, or waits for space."""
        unplaced = set(self.state.flights.unplaced_keys())
        for request in self.open.values():
            if isinstance(request, requests.Wait):
                objects, jobs = self.state.objects, self.state.flights.jobs
                assert any(
                    objects.find(key) or jobs.find(key) or key in unplaced for key in request.keys
                )

    def teardown(self) -> None:
        for client in [*self.places, *self.lost]:
            self.places = [other for other in self.places if other != client]
            self.gone(client)
            self.deliver(self.state.client_died(client, now_s=self.now_s))
            self.state.validate()
        statistics = self.state.statistics()
        assert statistics.held_nbytes == statistics.reserved_nbytes == 0
        assert statistics.num_jobs_queued == statistics.num_jobs_running == 0
        assert statistics.num_reservations_queued == statistics.num_workers == 0
        assert statistics.permits == {}
        assert statistics.num_clients == len(self.open) == len(self.state.flights.waiters) == 0
        assert all(item.state is ObjectState.SEALED for item in self.state.objects)


class AnythingShortOfMemory(Anything):
    """A machine that has free memory only at times."""

    def empty_state(self) -> StoreState:
        self.has_memory, self.backed = True, set[int]()
        return StoreState(CAPACITY_NBYTES, segment=1, shares=SHARES, back=self.back)

    def back(self, start: int, end: int) -> int:
        for number in range(start // 512, -(-end // 512)):
            if number not in self.backed and not self.has_memory:
                return max(start, number * 512)
            self.backed.add(number)
        return -(-end // 512) * 512

    @rule(has_memory=st.booleans())
    def memory(self, has_memory: bool) -> None:
        self.has_memory = has_memory
        if has_memory:
            self.deliver(self.state.look_again(now_s=self.now_s))

    @invariant()
    def nothing_is_where_there_is_no_memory(self) -> None:
        for item in self.state.objects:
            start, end = item.handle.offset, item.handle.offset + item.block_nbytes
            assert self.backed.issuperset(range(start // 512, -(-end // 512)))


TestAnything = Anything.TestCase
TestAnything.settings = examples(40, storm=400, stateful_step_count=80)
TestAnythingShortOfMemory = AnythingShortOfMemory.TestCase
TestAnythingShortOfMemory.settings = TestAnything.settings
