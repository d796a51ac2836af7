# ruff: noqa: ARG005 - what is put in the place of a method is called like it
"""The safeguards of the store, each of which can be switched off: a seed has to miss it.

What is patched here is the product's code as it is; where a safeguard moves, its ablation fails to
apply, and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from afferent.engine.reference.core.pins import Pins
from afferent.errors import StoreRestarted
from afferent.quota.earliest import Earliest
from afferent.quota.permits import Semaphores
from afferent.runtime import wire
from afferent.store.arena import ArenaMap
from afferent.store.client import async_store, daemon_store
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon import client_table
from afferent.store.daemon.client_table import ClientTable, Entry
from afferent.store.daemon.main import StoreDaemon
from afferent.store.protocol import requests
from afferent.store.state.budget import Budget
from afferent.store.state.handlers import HANDLERS
from afferent.store.state.index import ObjectIndex
from afferent.store.state.jobs import CrashCounts, JobQueue
from afferent.store.state.keeping import KeepQueue
from afferent.store.state.machine import StoreState
from afferent.store.state.object import ObjectState
from afferent.store.state.object_table import ObjectTable
from afferent.store.state.report import Client
from afferent.store.state.single_flight import SingleFlight
from afferent.store.state.waiters import Waiters

Replace = Callable[[Any, Any, Any], None]


@dataclass(frozen=True, slots=True)
class Ablation:
    """A safeguard.

    Attributes:
        what: Of what it guards, in words.
        seed: One that misses it.
        missed_as: The kind of promise that is broken then.
    """

    name: str
    what: str
    switch_off: Callable[[Replace], None]
    seed: int
    missed_as: str

    @contextmanager
    def applied(self) -> Iterator[None]:
        before: list[tuple[Any, str, Any]] = []

        def replace(owner: Any, name: Any, new: Any) -> None:
            # A KeyError: the safeguard is not where it was.
            before.append((owner, name, _parts(owner)[name]))
            _set(owner, name, new)

        try:
            self.switch_off(replace)
            yield
        finally:
            for owner, name, old in reversed(before):
                _set(owner, name, old)


ABLATIONS: list[Ablation] = []

MISSED: dict[str, tuple[int, str]] = {
    "pins": (9, "freed"),
    "doomed-blocks": (1, "exception"),
    "generations": (49, "bytes"),
    "epochs": (83, "bytes"),
    "death-by-pidfd": (32, "freed"),
    "jobs-wait-for-death": (127, "two at once"),
    "recovery": (130, "liveness"),
    "written-down": (1142, "two at once"),
    "start-times": (317, "liveness"),
    "retired-maps": (32, "freed"),
    "hello-lets-go": (1, "liveness"),
    "pinned-for-workers": (45, "freed"),
    "sources": (1623, "derived"),
    "single-flight": (21, "makers"),
    "strikes": (8, "strikes"),
    "overdue-jobs": (112, "leak"),
    "overdue-fetches": (77, "leak"),
    "fetches-in-vain": (77, "rules"),
    "kept-pins": (2877, "freed"),
    "hand-on": (30, "rules"),
    "abandoned-jobs": (84, "rules"),
    "place-waiting": (157, "rules"),
    "retried-creates": (65, "rules"),
    "promises": (9, "passed"),
    "no-passing": (10, "passed"),
    "first-come": (10, "passed"),
    "retired-permits": (3, "leak"),
    "settled-permits": (3, "leak"),
    "settled-room": (2, "rules"),
    "trimmed-tails": (2, "rules"),
    "withdrawals": (14, "given up"),
    "deadlines": (112, "deadline"),
    "released-calls": (490, "deadline"),
    "new-numbers": (443, "liveness"),
    "refused-calls": (103, "given up"),
    "lost-clients": (1043, "leak"),
    "absent-clients": (137, "rules"),
    "own-answers": (6, "exception"),
    "torn-messages": (63, "unanswered"),
    "heard-goodbyes": (44, "leak"),
    "coming-back": (1, "liveness"),
}
"""By which seed, and how."""


def ablation(what: str) -> Callable[[Callable[[Replace], None]], Callable[[Replace], None]]:
    """This function switches a safeguard off."""

    def register(switch_off: Callable[[Replace], None]) -> Callable[[Replace], None]:
        name = switch_off.__name__.strip("_").replace("_", "-")
        ABLATIONS.append(Ablation(name, what, switch_off, *MISSED[name]))
        return switch_off

    return register


# What is used stays where it is


@ablation("what is pinned is not evicted")
def _pins(replace: Replace) -> None:
    replace(ObjectTable, "pin", lambda self, lease, item: None)


@ablation("a deleted object's block is freed when its last reader or writer is gone")
def _doomed_blocks(replace: Replace) -> None:
    delete = ObjectTable.delete

    def at_once(self: Any, item: Any) -> None:
        is_held = item.held
        delete(self, item)
        if is_held:
            self._leases._held = {
                lease: {g: each for g, each in held.items() if each is not item}
                for lease, held in self._leases._held.items()
            }
            self.budget.release(item.kind, item.block_nbytes)
            item.writer = None
            item.pins.clear()
            self._remove(item)

    replace(ObjectTable, "delete", at_once)
    replace(ObjectTable, "_settle", _quietly(ObjectTable._settle))
    replace(StoreState, "validate", lambda self: None)


@ablation("a block that is used again has another generation")
def _generations(replace: Replace) -> None:
    def by_place(self: Any, handle: Any) -> Any:
        if handle.segment != self.segment:
            raise StoreRestarted("of another epoch")
        for item in self._by_generation.values():
            if item.handle.offset == handle.offset:
                return item
        return resolve(self, handle)

    resolve = ObjectIndex.resolve
    replace(ObjectIndex, "resolve", by_place)


@ablation("a handle of a former epoch is refused")
def _epochs(replace: Replace) -> None:
    resolve = ObjectIndex.resolve

    def of_any_epoch(self: Any, handle: Any) -> Any:
        found = self._by_generation.get(handle.generation)
        if found is not None and found.handle.offset == handle.offset:
            return found
        return resolve(self, handle)

    replace(ObjectIndex, "resolve", of_any_epoch)
    for store in (DaemonStore, AsyncDaemonStore):
        replace(store, "block", lambda self, h: self._arena.block(h.offset, h.nbytes))


@ablation("what a lost connection has pinned stays until its process is dead, or has come back")
def _death_by_pidfd(replace: Replace) -> None:
    def lets_go(self: Any, client: int) -> None:
        if client in self._clients:
            self._let_go(client)

    replace(StoreDaemon, "_on_end", lets_go)


@ablation("a job of a lost connection is handed on when its worker can't write any more")
def _jobs_wait_for_death(replace: Replace) -> None:
    lost = SingleFlight.client_lost

    def at_once(self: Any, client: int, *, now_s: float) -> None:
        lost(self, client, now_s=now_s)
        self.maker_died(client, now_s=now_s)

    replace(SingleFlight, "client_lost", at_once)


@ablation("a new daemon waits until nobody uses the arena of the former epoch")
def _recovery(replace: Replace) -> None:
    replace(
        StoreDaemon, "_await_former", lambda self, entry: self._client_table.remove(entry.client)
    )


@ablation("a client is written down before it is given the arena")
def _written_down(replace: Replace) -> None:
    add, remove = ClientTable.add, ClientTable.remove
    gone: set[int] = set()

    def later(self: Any, client: int, pid: int, token: int) -> None:
        gone.discard(client)

        def write() -> None:
            if client not in gone:
                add(self, client, pid, token)

        asyncio.get_running_loop().call_later(0.5, write)

    def forget(self: Any, client: int) -> None:
        gone.add(client)
        remove(self, client)

    replace(ClientTable, "add", later)
    replace(ClientTable, "remove", forget)


@ablation("a process that has got a dead one's pid is not waited for, nor killed")
def _start_times(replace: Replace) -> None:
    def open_pidfd(self: Any) -> int | None:
        try:
            return int(client_table.os.pidfd_open(self.pid))
        except ProcessLookupError:
            return None

    replace(Entry, "open_pidfd", open_pidfd)


@ablation("a client comes back when it uses nothing of the former life of its connection")
def _retired_maps(replace: Replace) -> None:
    replace(ArenaMap, "retire", lambda self, on_unused: on_unused() and None)


@ablation("who says hello again lets go of what it held before")
def _hello_lets_go(replace: Replace) -> None:
    replace(StoreDaemon, "_forget", lambda self, token: None)


@ablation("what was computed from an object is sealed while the object is pinned")
def _sources(replace: Replace) -> None:
    seal = StoreState._seal

    def without(self: Any, client: int, request: Any) -> Any:
        for item in request.items:
            item.sources = []
        return seal(self, client, request)

    replace(HANDLERS, requests.Seal, without)


@ablation("what a step looks at is pinned for each worker too, not for the core alone")
def _pinned_for_workers(replace: Replace) -> None:
    async def for_the_core(self: Any, lease: str, items: Any, clients: Any) -> bool:
        if items:
            await self._store.get(lease, [item.handle for item in items])
        return bool(items)

    replace(Pins, "_pin", for_the_core)


# Who makes what


@ablation("what somebody is making is not made twice")
def _single_flight(replace: Replace) -> None:
    find = SingleFlight._find

    def takes_over(self: Any, lease: Any, item: Any, now_s: float) -> Any:
        found = self.objects.find(item.key)
        if found is not None and found.state is ObjectState.CREATED and found.writer != lease:
            self.objects._take_key(found)
        return find(self, lease, item, now_s)

    replace(SingleFlight, "_find", takes_over)
    replace(StoreState, "validate", lambda self: None)


@ablation("a key that has killed two makers is refused for a minute")
def _strikes(replace: Replace) -> None:
    replace(CrashCounts, "is_quarantined", lambda self, key, *, now_s: False)


@ablation("a worker that holds a job for too long is killed")
def _overdue_jobs(replace: Replace) -> None:
    replace(JobQueue, "overdue", lambda self, **_: [])


@ablation("who fetches and hangs is killed, sooner than who makes")
def _overdue_fetches(replace: Replace) -> None:
    overdue = JobQueue.overdue

    def of_makers(self: Any, *, now_s: float, timeout_s: float, fetch_timeout_s: float) -> Any:
        return overdue(self, now_s=now_s, timeout_s=timeout_s)

    replace(JobQueue, "overdue", of_makers)


@ablation("what could not be fetched is made")
def _fetches_in_vain(replace: Replace) -> None:
    replace(SingleFlight, "_not_fetched", lambda self, job, worker, *, now_s: None)


@ablation("what is copied to a tier is pinned")
def _kept_pins(replace: Replace) -> None:
    replace(KeepQueue, "_pinned", lambda self, client, request, key: self._objects.find(key))


@ablation("when a maker is gone, another takes over")
def _hand_on(replace: Replace) -> None:
    replace(SingleFlight, "hand_on", lambda self, orphaned, *, now_s: None)


@ablation("a job that nobody waits for is dropped")
def _abandoned_jobs(replace: Replace) -> None:
    replace(SingleFlight, "_drop", lambda self, job: None)


@ablation("what waits for an extent is tried again when something is freed")
def _place_waiting(replace: Replace) -> None:
    replace(SingleFlight, "place_waiting", lambda self, *, now_s: None)


@ablation("a block that waits for an extent is tried again when something is freed")
def _retried_creates(replace: Replace) -> None:
    replace(StoreState, "_retry_creates", lambda self: None)


# Room and turns


@ablation("nobody is given what is promised to others")
def _promises(replace: Replace) -> None:
    replace(Budget, "unpromised_nbytes", lambda self, kind: self._capacity[kind] - self._held[kind])
    replace(StoreState, "validate", lambda self: None)


@ablation("who is next is not passed by what happens to fit")
def _no_passing(replace: Replace) -> None:
    hold = Budget.hold

    def blindly(self: Any, lease: Any, kind: Any, nbytes: int) -> int:
        awaited, self._num_awaited = self._num_awaited, dict.fromkeys(self._num_awaited, 0)
        try:
            return hold(self, lease, kind, nbytes)
        finally:
            self._num_awaited = awaited

    replace(Budget, "hold", blindly)
    replace(Budget, "is_awaited", lambda self, kind: False)


@ablation("of one tenant's equal requests the first comes first")
def _first_come(replace: Replace) -> None:
    put = Earliest.put

    def last_first(self: Any, entry: Any, tag: Any) -> None:
        put(self, entry, tag)
        self._numbers = iter(range(-len(self.heap) - 1, 10**9))

    replace(Earliest, "put", last_first)


@ablation("permits are given back when their request is forgotten")
def _retired_permits(replace: Replace) -> None:
    replace(StoreState, "_retire", lambda self, lease: self.flights.stop_waiting(lease))


@ablation("a free permit goes to who waits for it")
def _settled_permits(replace: Replace) -> None:
    replace(Semaphores, "settle", lambda self, is_running: [])
    replace(StoreState, "validate", lambda self: None)


@ablation("what was freed goes to who waits for room")
def _settled_room(replace: Replace) -> None:
    replace(Budget, "release", _unstirred(Budget.release))
    replace(Budget, "drop", _unstirred(Budget.drop))
    replace(Budget, "give_back", _unstirred(Budget.give_back))


@ablation("a seal gives back the bytes that were not used")
def _trimmed_tails(replace: Replace) -> None:
    def unreleased(self: Any, kind: Any, nbytes: int) -> None:
        if nbytes >= 64 * 2:
            release(self, kind, nbytes)

    release = Budget.release
    replace(Budget, "release", unreleased)


# Calls and connections


@ablation("a call that is given up takes back what it asked for")
def _withdrawals(replace: Replace) -> None:
    for verb in (requests.Reserve, requests.Create, requests.AcquirePermit):
        replace(verb, "withdrawal", lambda self: None)
    # Whole requests are forgotten at their end; the simulation's late calls look at once.


@ablation("a call ends by its deadline")
def _deadlines(replace: Replace) -> None:
    replace(async_store, "_expire", lambda future: None)


@ablation("what a refused call was never given is not taken back")
def _refused_calls(replace: Replace) -> None:
    def take_back(self: Any, lease: Any, amounts: Any, *, ticket: Any) -> None:
        self.give_back(lease, amounts)

    replace(Budget, "take_back", take_back)


@ablation("a call that waits fails when its request is released")
def _released_calls(replace: Replace) -> None:
    stop = Waiters.stop

    def silently(self: Any, lease: Any) -> Any:
        count = len(self._answers)
        found = stop(self, lease)
        del self._answers[count:]
        return found

    replace(Waiters, "stop", silently)


@ablation("nothing is done for a client that is lost")
def _lost_clients(replace: Replace) -> None:
    handle = StoreState.handle

    def for_all(self: Any, client: int, request: Any, *, now_s: float) -> Any:
        known = self._clients.get(client)
        if known is not None and known.connected:
            return handle(self, client, request, now_s=now_s)
        self._clients[client] = Client("", 0)
        try:
            replies = handle(self, client, request, now_s=now_s)
        finally:
            del self._clients[client]
            if known is not None:
                self._clients[client] = known
        return [(other, reply) for other, reply in replies if other != client]

    replace(StoreState, "handle", for_all)


@ablation("pins are taken only for clients that are there")
def _absent_clients(replace: Replace) -> None:
    def anyhow(self: Any, client: int, request: Any) -> None:
        found = self.objects.resolve_sealed(request.handles)
        self.objects.pin_all((client, request.request), found)
        for number in request.also_for:
            for item in found:
                self.objects.pin((number, request.request), item)

    replace(HANDLERS, requests.Get, anyhow)


@ablation("a client's number is never another's")
def _new_numbers(replace: Replace) -> None:
    def again(self: Any) -> int:
        taken = set(self._rows)
        return next(n for n in range(1, 10**6) if n not in taken)

    replace(ClientTable, "new_client", again)


@ablation("a call takes no answer but its own")
def _own_answers(replace: Replace) -> None:
    decode = daemon_store.decode
    replace(daemon_store, "decode", lambda decoder, frame: _Agreeable(decode(decoder, frame)))


@ablation("a connection on which a message was sent in part is given up")
def _torn_messages(replace: Replace) -> None:
    send = wire.SyncChannel.send

    def whole(self: Any, payload: bytes, *, timeout_s: float | None) -> None:
        try:
            send(self, payload, timeout_s=timeout_s)
        finally:
            self.is_torn = False

    replace(wire.SyncChannel, "send", whole)


@ablation("a client that leaves says so until it is heard")
def _heard_goodbyes(replace: Replace) -> None:
    replace(async_store, "leave", lambda where: None)
    replace(daemon_store, "leave", lambda where: None)


@ablation("a client that has lost the daemon comes back")
def _coming_back(replace: Replace) -> None:
    async def never(self: Any) -> None:
        return None

    replace(AsyncDaemonStore, "_reconnect", never)


# Tools


def _parts(owner: Any) -> Any:
    return owner if isinstance(owner, dict) else vars(owner)


def _set(owner: Any, name: Any, new: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = new
    else:
        setattr(owner, name, new)


class _Agreeable:
    """A reply to whatever was asked."""

    def __init__(self, reply: Any) -> None:
        self.result, self.failure, self.seq = reply.result, reply.failure, _Equal()


class _Equal:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def _quietly(call: Callable[..., Any]) -> Callable[..., Any]:
    def tried(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except (KeyError, ValueError):
            return None

    return tried


def _unstirred(call: Callable[..., Any]) -> Callable[..., Any]:
    def quiet(self: Any, *args: Any) -> Any:
        before = self._may_reserve
        found = call(self, *args)
        self._may_reserve = before
        return found

    return quiet
