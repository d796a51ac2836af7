"""The daemon's decisions: single flight, dying workers, leases. No process, no socket."""

from __future__ import annotations

from typing import Any

import msgspec

from afferent.errors import InvalidMedia
from afferent.store import messages as m
from afferent.store.state import StoreState
from afferent.types import Failure, Handle, ObjectKind

FRONTEND, OTHER, WORKER, SECOND = 1, 2, 3, 4
KEY = b"k" * 32


class Store:
    """A state with some clients, and their replies by client."""

    def __init__(self, capacity_nbytes: int = 1 << 20) -> None:
        self.state = StoreState(capacity_nbytes, segment=1)
        self.seq = 0
        self.now_s = 0.0
        self.inbox: dict[int, list[m.Reply]] = {client: [] for client in (1, 2, 3, 4)}
        for client in self.inbox:
            self.state.connect(client)

    def send(self, client: int, kind: type, *arguments: Any) -> int:
        self.seq += 1
        request = kind(self.seq, *arguments)
        self._deliver(self.state.handle(client, request, now_s=self.now_s))
        self.state.objects.validate()
        return self.seq

    def call(self, client: int, kind: type, *arguments: Any, returns: Any = None) -> Any:
        seq = self.send(client, kind, *arguments)
        reply = self.answer(client, seq)
        assert reply is not None
        assert reply.failure is None, reply.failure
        return msgspec.msgpack.decode(reply.result, type=returns or Any)

    def answer(self, client: int, seq: int) -> m.Reply | None:
        found = [reply for reply in self.inbox[client] if reply.seq == seq]
        return found[0] if found else None

    def die(self, client: int) -> None:
        self._deliver(self.state.client_died(client, now_s=self.now_s))
        self.state.objects.validate()

    def disconnect(self, client: int) -> None:
        self._deliver(self.state.disconnect(client, now_s=self.now_s))
        self.state.objects.validate()

    def _deliver(self, replies: list) -> None:
        for client, reply in replies:
            self.inbox[client].append(reply)

    # Usual steps

    def raw(self, client: int, request: str) -> Handle:
        items = [m.CreateItem(ObjectKind.RAW, 100)]
        (handle,) = self.call(client, m.Create, request, items, returns=list[Handle])
        self.call(client, m.Seal, request, [m.SealItem(handle, 100)])
        return handle

    def acquire(self, client: int, request: str, key: bytes = KEY) -> m.Outcome:
        handle = self.raw(client, request)
        item = m.AcquireItem(key, ObjectKind.FEATURES, 1000, m.JobSpec([handle], b"how"))
        (outcome,) = self.call(client, m.Acquire, request, [item], returns=list[m.Outcome])
        self.call(client, m.Release, request, [handle])
        return outcome

    def take(self, worker: int) -> m.Order:
        return self.call(worker, m.Take, returns=m.Order)

    def finish(self, worker: int, order: m.Order, failure: Failure | None = None) -> None:
        self.call(worker, m.Finish, order.job, 0 if failure else 900, failure, [])


def outcome_of(reply: m.Reply | None) -> m.Outcome:
    assert reply is not None
    (outcome,) = msgspec.msgpack.decode(reply.result, type=list[m.Outcome])
    return outcome


def test_miss_then_made_then_hit() -> None:
    store = Store()
    assert store.acquire(FRONTEND, "r1").state == "miss"
    wait = store.send(FRONTEND, m.Wait, "r1", [KEY])
    assert store.answer(FRONTEND, wait) is None
    order = store.take(WORKER)
    assert order.payload == b"how"
    store.finish(WORKER, order)
    made = outcome_of(store.answer(FRONTEND, wait))
    assert made.state == "made"
    assert made.handle is not None
    assert made.handle.nbytes == 900
    hit = store.acquire(OTHER, "r2")
    assert (hit.state, hit.handle) == ("hit", made.handle)
    for client, request in ((FRONTEND, "r1"), (OTHER, "r2")):
        store.call(client, m.Release, request, None)
    statistics = store.state.statistics()
    assert statistics.pinned_nbytes == 0
    assert (statistics.num_misses, statistics.num_hits, statistics.num_objects) == (1, 1, 1)


def test_single_flight() -> None:
    """Whoever asks while it is being made gets the same object, pinned for each."""
    store = Store()
    assert store.acquire(FRONTEND, "r1").state == "miss"
    order = store.take(WORKER)
    assert store.acquire(FRONTEND, "r2").state == "busy"
    assert store.acquire(OTHER, "r1").state == "busy"
    waits = [
        (client, store.send(client, m.Wait, request, [KEY]))
        for client, request in ((FRONTEND, "r1"), (FRONTEND, "r2"), (OTHER, "r1"))
    ]
    store.finish(WORKER, order)
    outcomes = [outcome_of(store.answer(client, seq)) for client, seq in waits]
    assert {outcome.state for outcome in outcomes} == {"made"}
    assert len({outcome.handle for outcome in outcomes}) == 1
    (item,) = store.state.objects
    assert set(item.pins) == {(FRONTEND, "r1"), (FRONTEND, "r2"), (OTHER, "r1")}


def test_a_wait_for_several_is_answered_once_all_have_an_end() -> None:
    store = Store()
    keys = [b"1" * 32, b"2" * 32]
    for key in keys:
        store.acquire(FRONTEND, "r", key)
    wait = store.send(FRONTEND, m.Wait, "r", keys)
    store.finish(WORKER, store.take(WORKER))
    assert store.answer(FRONTEND, wait) is None
    failure = Failure(InvalidMedia.code, "bad")
    store.finish(WORKER, store.take(WORKER), failure)
    reply = store.answer(FRONTEND, wait)
    assert reply is not None
    good, bad = msgspec.msgpack.decode(reply.result, type=list[m.Outcome])
    assert (good.state, bad.state, bad.failure) == ("made", "failed", failure)


def test_a_bad_item_fails_all_and_is_not_kept() -> None:
    store = Store()
    store.acquire(FRONTEND, "r1")
    store.acquire(OTHER, "r2")
    waits = [
        (FRONTEND, store.send(FRONTEND, m.Wait, "r1", [KEY])),
        (OTHER, store.send(OTHER, m.Wait, "r2", [KEY])),
    ]
    store.finish(WORKER, store.take(WORKER), Failure("invalid_media", "truncated"))
    for client, seq in waits:
        assert outcome_of(store.answer(client, seq)).state == "failed"
    assert store.state.statistics().num_objects == 0
    assert store.acquire(FRONTEND, "r3").state == "miss"


def test_a_dead_worker_fails_its_job_retryably() -> None:
    store = Store()
    store.acquire(FRONTEND, "r1")
    wait = store.send(FRONTEND, m.Wait, "r1", [KEY])
    store.take(WORKER)
    store.die(WORKER)
    outcome = outcome_of(store.answer(FRONTEND, wait))
    assert outcome.failure is not None
    assert outcome.failure.code == "worker_died"
    assert store.state.statistics().used_nbytes == 0
    store.call(FRONTEND, m.Release, "r1", None)
    assert store.acquire(FRONTEND, "r2").state == "miss"


def test_a_key_that_killed_two_workers_is_refused_for_a_minute() -> None:
    store = Store()
    for worker in (WORKER, SECOND):
        assert store.acquire(FRONTEND, "r").state == "miss"
        store.take(worker)
        store.die(worker)
        store.call(FRONTEND, m.Release, "r", None)
    refused = store.acquire(FRONTEND, "r")
    assert refused.failure is not None
    assert refused.failure.code == "maker_refused"
    assert store.acquire(FRONTEND, "other", b"o" * 32).state == "miss"
    store.now_s = 61.0
    assert store.acquire(FRONTEND, "r").state == "miss"


def test_a_lost_connection_is_not_yet_a_death() -> None:
    """The process may still write: its block is not reused until its pidfd says so."""
    store = Store()
    store.acquire(FRONTEND, "r1")
    lost = store.take(WORKER).target
    store.disconnect(WORKER)
    store.call(FRONTEND, m.Release, "r1", None)
    assert store.acquire(FRONTEND, "r2").state == "miss"
    again = store.take(SECOND).target
    assert again.offset != lost.offset
    assert store.state.statistics().num_objects == 4
    store.die(WORKER)
    assert store.state.statistics().num_objects == 2


def test_a_job_that_nobody_awaits_is_dropped_if_nobody_works_on_it() -> None:
    store = Store()
    store.acquire(FRONTEND, "r1")
    store.acquire(OTHER, "r2")
    store.die(FRONTEND)
    assert store.state.statistics().num_jobs_queued == 1
    store.call(OTHER, m.Release, "r2", None)
    statistics = store.state.statistics()
    assert (statistics.num_jobs_queued, statistics.num_objects) == (0, 0)


def test_a_job_under_way_is_finished_though_nobody_awaits_it() -> None:
    store = Store()
    store.acquire(FRONTEND, "r1")
    order = store.take(WORKER)
    store.call(FRONTEND, m.Release, "r1", None)
    store.finish(WORKER, order)
    assert store.acquire(OTHER, "r2").state == "hit"


def test_workers_wait_for_jobs_in_turn() -> None:
    store = Store()
    takes = [(worker, store.send(worker, m.Take)) for worker in (WORKER, SECOND)]
    store.acquire(FRONTEND, "r", b"1" * 32)
    assert [store.answer(worker, seq) is not None for worker, seq in takes] == [True, False]
    store.acquire(FRONTEND, "r", b"2" * 32)
    assert all(store.answer(worker, seq) is not None for worker, seq in takes)


def test_a_question_makes_nothing() -> None:
    store = Store()
    item = m.AcquireItem(KEY, ObjectKind.FEATURES, 1000, None)
    (outcome,) = store.call(FRONTEND, m.Acquire, "r", [item], returns=list[m.Outcome])
    assert outcome.state == "absent"
    assert store.state.statistics().num_objects == 0
    store.acquire(OTHER, "r")
    (outcome,) = store.call(FRONTEND, m.Acquire, "r", [item], returns=list[m.Outcome])
    assert outcome.state == "busy"


def test_a_hit_needs_no_room() -> None:
    """In an arena that is too full for the raw media, what is there is still found."""
    store = Store(capacity_nbytes=2048)
    store.acquire(FRONTEND, "r1")
    store.finish(WORKER, store.take(WORKER))
    store.call(FRONTEND, m.Release, "r1", None)
    rest = m.CreateItem(ObjectKind.RAW, 960)
    store.call(OTHER, m.Create, "rest", [rest])
    item = m.AcquireItem(KEY, ObjectKind.FEATURES, 1000, None)
    (outcome,) = store.call(FRONTEND, m.Acquire, "r2", [item], returns=list[m.Outcome])
    assert outcome.state == "hit"


def test_what_a_lost_client_still_says_is_not_done() -> None:
    store = Store()
    store.die(FRONTEND)
    store.send(FRONTEND, m.Create, "r", [m.CreateItem(ObjectKind.RAW, 100)])
    assert store.inbox[FRONTEND] == []
    assert store.state.statistics().num_objects == 0


def test_a_wait_for_nothing_is_answered() -> None:
    store = Store()
    assert store.call(FRONTEND, m.Wait, "nobody", []) == []


def test_no_room_fails_the_item_and_leaves_nothing() -> None:
    store = Store(capacity_nbytes=1024)
    store.call(OTHER, m.Create, "rest", [m.CreateItem(ObjectKind.RAW, 512)])
    outcome = store.acquire(FRONTEND, "r1")
    assert outcome.failure is not None
    assert outcome.failure.code == "store_full"
    assert store.state.statistics().num_objects == 1


def test_create_is_all_or_nothing() -> None:
    store = Store(capacity_nbytes=512)
    items = [m.CreateItem(ObjectKind.RAW, 300), m.CreateItem(ObjectKind.RAW, 300)]
    reply = store.answer(FRONTEND, store.send(FRONTEND, m.Create, "r", items))
    assert reply is not None
    assert reply.failure is not None
    assert reply.failure.code == "store_full"
    assert store.state.statistics().num_objects == 0


def test_get_is_all_or_nothing() -> None:
    store = Store()
    handle = store.raw(FRONTEND, "r")
    stale = Handle(1, 4096, 100, 99)
    reply = store.answer(OTHER, store.send(OTHER, m.Get, "r", [handle, stale]))
    assert reply is not None
    assert reply.failure is not None
    assert reply.failure.code == "stale_handle"
    (item,) = store.state.objects
    assert set(item.pins) == {(FRONTEND, "r")}


def test_only_the_worker_that_took_a_job_finishes_it() -> None:
    store = Store()
    store.acquire(FRONTEND, "r")
    order = store.take(WORKER)
    seq = store.send(SECOND, m.Finish, order.job, 900, None, [])
    reply = store.answer(SECOND, seq)
    assert reply is not None
    assert reply.failure is not None
    assert reply.failure.code == "not_permitted"
    store.finish(WORKER, order)


def test_one_waits_only_for_what_one_acquired() -> None:
    store = Store()
    store.acquire(FRONTEND, "r")
    seq = store.send(OTHER, m.Wait, "r", [KEY])
    reply = store.answer(OTHER, seq)
    assert reply is not None
    assert reply.failure is not None
    assert reply.failure.code == "not_permitted"
