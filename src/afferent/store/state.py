"""What the daemon knows and decides: requests in, replies out. No I/O.

This is where objects, jobs and waiting requests meet. A missing object is allocated and its job
queued in one step (single flight: once, whoever else asks), and when it is sealed, every request
that waits for it gets its pin in the same step, so that nothing can be evicted between the two.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from afferent.errors import AfferentError, ClientGone, NotPermitted, StaleHandle, StoreError
from afferent.store import messages as m
from afferent.store.allocator import round_up
from afferent.store.ledger import Amounts, ClientId, Lease, Reservation
from afferent.store.making import Making
from afferent.store.objects import ObjectTable
from afferent.store.region import DEFAULT_SHARES, Shares
from afferent.store.report import Client, Report
from afferent.store.slots import Entry, Slots
from afferent.store.stored import NewObject, ObjectState
from afferent.store.tallies import Tallies
from afferent.store.waiters import RELEASED
from afferent.types import ContentKey, Failure, Handle, ObjectKind, encode

Replies = list[tuple[ClientId, m.Reply]]

_Pending = tuple[ClientId, m.Create]

_LATER = object()
"""The result of a verb that is answered when there is something to say."""


class StoreState:
    """One epoch of a store. Clients are numbers from 1; their messages are `messages.Request`."""

    def __init__(
        self, capacity_nbytes: int, *, segment: int, shares: Shares = DEFAULT_SHARES
    ) -> None:
        self.objects = ObjectTable(capacity_nbytes, segment=segment, shares=shares)
        self.making = Making(self.objects, self._reply)
        self._clients: dict[ClientId, Client] = {}
        self.slots = Slots()
        self.tallies = Tallies()
        self._report = Report(self.objects, self.making, self.slots, self._clients)
        # `Create`s under a grant that wait for a run that is long enough.
        self._pending: deque[_Pending] = deque()
        self._num_let_go = 0
        self._outbox: Replies = []

    # Events

    def connect(self, client: ClientId, *, name: str = "", pid: int = 0) -> None:
        self._clients[client] = Client(name, pid)

    def handle(self, client: ClientId, request: m.Request, *, now_s: float) -> Replies:
        """Do what a client asks; the replies that this causes, to it and to others.

        What comes from a client that has been lost is not done: nobody could let go of it.
        """
        if client not in self._clients or not self._clients[client].connected:
            return []
        try:
            result = self._dispatch(client, request, now_s)
        except AfferentError as error:
            self._fail(client, request.seq, error)
        else:
            if result is not _LATER and request.seq != m.NO_REPLY:
                self._reply(client, request.seq, result)
        return self._settle(now_s)

    def disconnect(self, client: ClientId, *, now_s: float) -> Replies:
        """A connection has ended, but its process may still map the arena.

        Nobody waits for it any more, and nobody can find what it was writing; its pins stay until
        `client_died`, and so do its jobs: they may be handed on when it can't write any more.
        """
        self._lose(client, now_s)
        return self._settle(now_s)

    def client_died(self, client: ClientId, *, now_s: float) -> Replies:
        """Nothing of a client can read or write any more: its process is gone, or says so."""
        self._lose(client, now_s)
        self.making.maker_died(client, now_s=now_s)
        self.objects.drop_client(client)
        self._clients.pop(client, None)
        return self._settle(now_s)

    def _lose(self, client: ClientId, now_s: float) -> None:
        if client in self._clients:
            self._clients[client].connected = False
        self._drop_pending(lambda entry: entry[0] == client)
        self.tallies.lose(client)
        for lease in self.slots.leases_of(client):
            self._retire(lease)
        self.making.client_lost(client, now_s=now_s)
        for lease in self.objects.ledger.leases_of(client):
            self.objects.ledger.drop(lease)

    def holds_anything(self, client: ClientId) -> bool:
        """Whether a client may still read or write a block."""
        return self.objects.holds_anything(client)

    # Verbs

    def _dispatch(self, client: ClientId, request: m.Request, now_s: float) -> object:
        match request:
            case m.Acquire():
                lease = (client, request.request)
                return self.making.acquire(lease, request.items, now_s=now_s)
            case m.Wait():
                keys = [ContentKey(key) for key in request.keys]
                self.making.waiters.wait(request.seq, (client, request.request), keys)
                return _LATER
            case m.Create():
                return self._create(client, request)
            case m.Seal():
                return self._seal((client, request.request), request.items)
            case m.Abort():
                self._abort((client, request.request), request)
                return None
            case m.Get():
                self._get(client, request)
                return None
            case m.Release():
                self._release((client, request.request), request.handles)
                return None
            case m.Reserve():
                return self._reserve(client, request)
            case m.Unreserve():
                ticket = (client, request.ticket)
                if self._drop_pending(lambda entry: (entry[0], entry[1].seq) == ticket) or (
                    self.objects.ledger.cancel(ticket)
                ):
                    self._fail(client, request.ticket, RELEASED)
                else:
                    amounts = _amounts(request.items)
                    self.objects.ledger.give_back((client, request.request), amounts)
                return None
            case m.Enter():
                ticket, lease = (client, request.seq), (client, request.request)
                entry = Entry(ticket, lease, request.slot, request.limit)
                return None if self.slots.enter(entry, queue=request.queue) else _LATER
            case m.Leave():
                waiting = self.slots.leave((client, request.request), request.slot)
                if waiting is not None:
                    self._fail(*waiting, RELEASED)
                return None
            case m.Delete():
                return [self._delete(ContentKey(key)) for key in request.keys]
            case m.Evict():
                return m.Evicted(*self.objects.evict(request.kind, request.nbytes))
            case m.Take():
                self._clients[client].is_worker = True
                self.making.worker_idle(client, request.seq, now_s=now_s)
                return _LATER
            case m.Finish():
                self.making.finish(client, request)
                return None
            case m.List():
                return self._report.objects(request.kind, limit=request.limit)
            case m.Clients():
                return self._report.clients()
            case m.Stat():
                return self.statistics()
            case m.Push():
                self.tallies.push(client, request.source, request.samples)
                return None
            case m.Figures():
                return self.tallies.total()
            case _:
                assert_never(request)

    def statistics(self) -> m.Statistics:
        return self._report.statistics()

    def _create(self, client: ClientId, request: m.Create) -> object:
        lease = (client, request.request)
        if any(
            item.key and self.making.waiters.is_awaited(ContentKey(item.key))
            for item in request.items
        ):
            raise StoreError("an object with this key is being made")
        news = [
            NewObject(item.kind, item.nbytes, ContentKey(item.key) if item.key else None)
            for item in request.items
        ]
        needed = _amounts(request.items)
        is_granted = all(
            self.objects.ledger.grant_of(lease, kind) >= nbytes for kind, nbytes in needed.items()
        )
        created = self.objects.create_all(lease, news)
        if created is not None:
            return [item.handle for item in created]
        if not is_granted:
            raise self.objects.no_run()
        self._pending.append((client, request))
        return _LATER

    def _seal(self, lease: Lease, items: list[m.SealItem]) -> list[Handle]:
        """All or none: what could be refused is refused before the first is sealed."""
        found = [self.objects.resolve(item.handle) for item in items]
        if len({item.handle.generation for item in found}) < len(found):
            raise NotPermitted("an object is sealed once")
        for item, target in zip(items, found, strict=True):
            self.objects.check_seal(lease, target, used_nbytes=item.used_nbytes)
            for source in item.sources:
                if lease not in self.objects.resolve(source).pins:
                    raise StaleHandle("what this was computed from is not pinned any more")
        for item, target in zip(items, found, strict=True):
            self.objects.seal(lease, target, used_nbytes=item.used_nbytes)
            self.making.sealed(target)
        return [target.handle for target in found]

    def _abort(self, lease: Lease, request: m.Abort) -> None:
        found = [self.objects.resolve(handle) for handle in request.handles]
        if any(item.writer != lease for item in found):
            raise NotPermitted("only the writer aborts an object")
        for item in found:
            if request.failure is not None and item.key is not None:
                self.making.failed(item.key, request.failure)
            if item.writer == lease:  # not, if a handle is named twice
                self.objects.abort(lease, item)

    def _get(self, client: ClientId, request: m.Get) -> None:
        """All or none: once they are held, a pin more can't be refused."""
        found = self.objects.resolve_sealed(request.handles)
        others = [self._clients.get(other) for other in request.also_for]
        if not all(other is not None and other.connected for other in others):
            raise ClientGone("a process that should read an object is gone; try again")
        self.objects.pin_all((client, request.request), found)
        for number in request.also_for:
            for item in found:
                self.objects.pin((number, request.request), item)

    def _release(self, lease: Lease, handles: list[Handle] | None) -> None:
        if handles is None:
            self._release_all(lease)
            return
        found = [self.objects.resolve(handle) for handle in handles]
        asked = Counter(item.handle.generation for item in found)
        if any(item.pins.get(lease, 0) < asked[item.handle.generation] for item in found):
            raise NotPermitted("this lease does not hold the object")
        for item in found:
            self.objects.unpin(lease, item)

    def _release_all(self, lease: Lease) -> None:
        """Drop a request; its calls that are still to be answered fail."""
        for client, seq in self.objects.ledger.drop(lease):
            self._fail(client, seq, RELEASED)
        for client, create in self._drop_pending(
            lambda entry: (entry[0], entry[1].request) == lease
        ):
            self._fail(client, create.seq, RELEASED)
        self._retire(lease)
        self.objects.drop_lease(lease)

    def _retire(self, lease: Lease) -> None:
        """A request has gone; its places in slots outlast it where jobs still run for it alone."""
        if lease in self.slots:
            for ticket in self.slots.retire(lease, self.making.running_for(lease)):
                self._fail(*ticket, RELEASED)
        self.making.stop_waiting(lease)

    def _reserve(self, client: ClientId, request: m.Reserve) -> object:
        lease, amounts = (client, request.request), _amounts(request.items)
        ledger = self.objects.ledger
        for kind, nbytes in amounts.items():
            ledger.check_fits(kind, ledger.grant_of(lease, kind) + nbytes)
        if not request.queue:
            ledger.grant(lease, amounts)
            return None
        ledger.enqueue(Reservation((client, request.seq), lease, amounts))
        return _LATER  # `_settle` answers, at once if there is room

    def _delete(self, key: ContentKey) -> bool:
        found = self.objects.find(key)
        if found is None or found.state is not ObjectState.SEALED:
            return False
        self.objects.doom(found)
        return True

    def validate(self) -> None:
        """Check every rule; for tests."""
        self.objects.validate()
        self.making.validate()
        self.slots.validate()
        if any(not self._clients[client].connected for client, _ in self._pending):
            raise StoreError("a client that was lost still waits for room")
        for item in self.objects:
            for client, _ in [*item.pins, *([item.writer] if item.writer else [])]:
                if client and client not in self._clients:
                    raise StoreError("a client that is dead holds an object")

    # Inner steps

    def _settle(self, now_s: float) -> Replies:
        """Do what an event has made possible for others; all replies since the last call."""
        self.making.hand_on(now_s=now_s)
        for reservation in self.objects.ledger.grant_queued():
            self._reply(*reservation.ticket, None)
        for entry in self.slots.settle(self.making.jobs.is_running):
            self._reply(*entry.ticket, None)
        if self._num_let_go != self.objects.num_let_go:
            self.making.place_waiting(now_s=now_s)
            self._retry_creates()
            # Read last: what these took and gave back again has made no room.
            self._num_let_go = self.objects.num_let_go
        outbox, self._outbox = self._outbox, []
        return outbox

    def _drop_pending(self, is_dropped: Callable[[_Pending], bool]) -> list[_Pending]:
        """Forget `Create`s that wait; which."""
        if not self._pending:
            return []
        dropped = [entry for entry in self._pending if is_dropped(entry)]
        self._pending = deque(entry for entry in self._pending if not is_dropped(entry))
        return dropped

    def _retry_creates(self) -> None:
        waiting, self._pending = self._pending, deque()
        for client, create in waiting:
            try:
                result = self._create(client, create)
            except AfferentError as error:
                self._fail(client, create.seq, error)
            else:
                if result is not _LATER:
                    self._reply(client, create.seq, result)

    def _fail(self, client: ClientId, seq: int, error: AfferentError) -> None:
        self._reply(client, seq, None, Failure(error.code, error.message))

    def _reply(
        self, client: ClientId, seq: int, result: object, failure: Failure | None = None
    ) -> None:
        if client in self._clients and self._clients[client].connected:
            self._outbox.append((client, m.Reply(seq, msgspec.Raw(encode(result)), failure)))


def _amounts(items: Sequence[m.ReserveItem] | Sequence[m.CreateItem]) -> Amounts:
    """How much of each kind these take."""
    amounts: dict[ObjectKind, int] = {}
    for item in items:
        amounts[item.kind] = amounts.get(item.kind, 0) + round_up(item.nbytes)
    return amounts
