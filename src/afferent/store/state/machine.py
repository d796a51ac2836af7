"""State machine of the daemon: requests in, replies out. No I/O.

It connects objects, jobs and waiting requests. Two steps are atomic:

- A missing object is allocated and its job queued, once for all requests (single flight).
- When the object is sealed, every request that waits for it gets its pin. So it can't be evicted
  in between.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from afferent.admission.permits import PermitRequest, Semaphores
from afferent.admission.shares import NAMELESS, Share
from afferent.errors import AfferentError, ClientGone, NotPermitted, StaleHandle, StoreError
from afferent.store.protocol import requests
from afferent.store.protocol.replies import Reply
from afferent.store.protocol.requests import NO_REPLY, Request
from afferent.store.protocol.results import (
    ClientInfo,
    Evicted,
    ItemPage,
    ObjectInfo,
    Outcome,
    Statistics,
    StoredItem,
    TenantInfo,
)
from afferent.store.state.allocator import round_up
from afferent.store.state.budget import Amounts, QueuedReservation
from afferent.store.state.catalogue import inherited_label
from afferent.store.state.early_releases import EarlyReleases
from afferent.store.state.handlers import HANDLERS, LATER, Later, check_all, handles
from afferent.store.state.holders import Client, Holders
from afferent.store.state.object import NewObject, ObjectState
from afferent.store.state.object_table import ObjectTable
from afferent.store.state.region import DEFAULT_SHARES, Back, Shares
from afferent.store.state.report import Report
from afferent.store.state.single_flight import SingleFlight
from afferent.store.state.waiters import RELEASED
from afferent.telemetry.aggregation import Aggregation
from afferent.telemetry.readings import Reading
from afferent.types import (
    ClientId,
    ContentKey,
    CreateItem,
    Failure,
    Handle,
    Lease,
    ObjectKind,
    ReserveItem,
    encode,
)

Replies = list[tuple[ClientId, Reply]]

_Pending = tuple[ClientId, requests.Create]


class StoreState:
    """One epoch of a store. Clients are numbers from 1; each call is a `Request`.

    Invariants:
        - Only connected clients have pending calls, watch items and receive replies.
        - Each writer and pin belongs to a known client or to the store itself.
    """

    def __init__(
        self,
        capacity_nbytes: int,
        *,
        segment: int,
        shares: Shares = DEFAULT_SHARES,
        back: Back | None = None,
    ) -> None:
        """Create an empty store.

        Args:
            back: Gets arena memory on demand; without it, the whole arena has its memory.
        """
        self._now_s = 0.0  # of the current event
        self.objects = ObjectTable(
            capacity_nbytes,
            segment=segment,
            shares=shares,
            back=back,
            clock=lambda: self._now_s,
        )
        # Tenant shares by client and request; a missing entry means the default tenant.
        self._shares: dict[ClientId, dict[str | int, Share]] = {}
        self._clients: dict[ClientId, Client] = {}
        self.holders = Holders(self.objects, self._clients, lambda: self._now_s)
        self.flights = SingleFlight(self.objects, self._share_of, self.holders.failure_of)
        self.early = EarlyReleases()
        self.semaphores = Semaphores()
        self.metrics = Aggregation()
        self._report = Report(self.objects, self.flights, self.semaphores, self._clients)
        # `Create`s with a reservation that wait for a long enough extent.
        self._pending: deque[_Pending] = deque()
        self._watchers: dict[ClientId, requests.WatchItems] = {}
        self._outbox: Replies = []

    # Events

    def connect(self, client: ClientId, *, name: str = "", pid: int = 0) -> None:
        self._clients[client] = Client(name, pid)

    def handle(self, client: ClientId, request: Request[Any], *, now_s: float) -> Replies:
        """Handle a request; return the replies to this client and to others.

        A request from a lost client is ignored: its pins could never be released.
        """
        if client not in self._clients or not self._clients[client].connected:
            return []
        self._now_s = now_s
        try:
            result = HANDLERS[type(request)](self, client, request)
        except AfferentError as error:
            self._fail(client, request.seq, error)
        else:
            if result is not LATER and request.seq != NO_REPLY:
                self._reply(client, request.seq, result)
        return self._settle()

    def look_again(self, *, now_s: float) -> Replies:
        """Retry all waiting requests: memory that was refused may be available now."""
        self._now_s = now_s
        self.objects.look_again()
        return self._settle()

    def disconnect(self, client: ClientId, *, now_s: float) -> Replies:
        """Handle the end of a connection; the client's process may still map the arena.

        Its calls are dropped, and the objects that it was writing lose their keys. Its pins and its
        jobs stay until `client_died`, as it may still write until then.
        """
        self._now_s = now_s
        self._lose(client)
        return self._settle()

    def client_died(self, client: ClientId, *, now_s: float) -> Replies:
        """Release all leases of a client: its process is gone, or uses nothing any more."""
        self._now_s = now_s
        self._lose(client)
        self.flights.maker_died(client, now_s=now_s)
        self.objects.drop_client(client)
        self._clients.pop(client, None)
        return self._settle()

    def _lose(self, client: ClientId) -> None:
        if client in self._clients:
            self._clients[client].connected = False
        self._drop_pending(lambda entry: entry[0] == client)
        self.metrics.lose(client)
        for lease in self.semaphores.leases_of(client):
            self._retire(lease)
        self.flights.client_lost(client, now_s=self._now_s)
        for lease in self.objects.budget.leases_of(client):
            self.objects.budget.drop(lease)
        self._shares.pop(client, None)
        self._watchers.pop(client, None)
        self.early.forget_client(client)

    def holds_anything(self, client: ClientId) -> bool:
        """Whether a client may still read or write a block."""
        return self.objects.holds_anything(client)

    def statistics(self) -> Statistics:
        return self._report.statistics()

    def _share_of(self, lease: Lease) -> Share:
        client, request = lease
        return self._shares.get(client, {}).get(request, NAMELESS)

    # Verbs

    @handles(requests.Introduce)
    def _introduce(self, client: ClientId, request: requests.Introduce) -> None:
        self._shares.setdefault(client, {})[request.request] = request.share

    @handles(requests.Acquire)
    def _acquire(self, client: ClientId, request: requests.Acquire) -> list[Outcome]:
        lease = (client, request.request)
        return self.flights.acquire(lease, request.items, now_s=self._now_s)

    @handles(requests.Wait)
    def _wait(self, client: ClientId, request: requests.Wait) -> Later:
        keys = [ContentKey(key) for key in request.keys]
        self.flights.waiters.wait(request.seq, (client, request.request), keys)
        return LATER

    @handles(requests.Create)
    def _create(self, client: ClientId, request: requests.Create) -> list[Handle] | Later:
        lease = (client, request.request)
        if any(
            item.key and self.flights.waiters.is_awaited(ContentKey(item.key))
            for item in request.items
        ):
            raise StoreError("an object with this key is being made")
        news = [
            NewObject(item.kind, item.nbytes, ContentKey(item.key) if item.key else None)
            for item in request.items
        ]
        needed = _amounts(request.items)
        is_reserved = all(
            self.objects.budget.reservation_of(lease, kind) >= nbytes
            for kind, nbytes in needed.items()
        )
        created = self.objects.create_all(lease, news)
        if created is not None:
            return [item.handle for item in created]
        if not is_reserved:
            raise self.objects.no_extent(needed)
        self._pending.append((client, request))
        return LATER

    @handles(requests.Seal)
    def _seal(self, client: ClientId, request: requests.Seal) -> list[Handle]:
        """Seal all items or none: every check runs before the first seal."""
        lease, items = (client, request.request), request.items
        found = [self.objects.resolve(item.handle) for item in items]
        if len({item.handle.generation for item in found}) < len(found):
            raise NotPermitted("an object is sealed once")
        for item, target in zip(items, found, strict=True):
            self.objects.check_seal(lease, target, used_nbytes=item.used_nbytes)
            for source in item.sources:
                if lease not in self.objects.resolve(source).pins:
                    raise StaleHandle("what this was computed from is not pinned any more")
        for item, target in zip(items, found, strict=True):
            sources = [self.objects.resolve(source) for source in item.sources]
            if target.label is None and sources:
                target.label = inherited_label(sources[0])
            self.objects.seal(lease, target, used_nbytes=item.used_nbytes)
            self.flights.sealed(target, lease=lease, sources=sources, made_us=item.made_us)
        return [target.handle for target in found]

    @handles(requests.Abort)
    def _abort(self, client: ClientId, request: requests.Abort) -> None:
        lease = (client, request.request)
        found = [self.objects.resolve(handle) for handle in request.handles]
        if any(item.writer != lease for item in found):
            raise NotPermitted("only the request that created an object aborts it")
        if (failure := request.failure) is not None:
            for item in found:
                if item.key is not None:
                    self.flights.failed(item.key, failure)
        self.objects.abort_all(lease, list(dict.fromkeys(found)))  # a handle may occur twice

    @handles(requests.Get)
    def _get(self, client: ClientId, request: requests.Get) -> None:
        """Pin all items or none: after the first pin of an object, further pins can't fail."""
        found = self.objects.resolve_sealed(request.handles, holder=client)
        others = [self._clients.get(other) for other in request.also_for]
        if not all(other is not None and other.connected for other in others):
            raise ClientGone("a process that should read an object is gone; try again")
        self.objects.pin_all((client, request.request), found)
        for number in request.also_for:
            for item in found:
                self.objects.pin((number, request.request), item)

    @handles(requests.Release)
    def _release(self, client: ClientId, request: requests.Release) -> None:
        lease = (client, request.request)
        if request.handles is None:
            self._release_all(lease)
            return
        found = [self.objects.resolve(handle) for handle in request.handles]
        entry = Counter(item.handle.generation for item in found)
        if any(item.pins.get(lease, 0) < entry[item.handle.generation] for item in found):
            raise NotPermitted("the request does not hold the object, or not so often")
        for item in found:
            self.objects.unpin(lease, item)
            if lease not in item.pins:
                self.early.disallow(lease, item.handle.generation)

    @handles(requests.ReleaseEarly)
    def _release_early(self, client: ClientId, request: requests.ReleaseEarly) -> None:
        lease = (client, request.request)
        for item in self.objects.resolve_sealed(request.handles):
            if lease in item.pins:
                self.early.allow(lease, item.handle.generation)

    @handles(requests.ReportEncoded)
    def _report_encoded(self, _: ClientId, request: requests.ReportEncoded) -> None:
        for key in request.keys:
            item = self.objects.find(ContentKey(key))
            if item is None or (lease := self.early.end_one(item.handle.generation)) is None:
                continue
            for _number in range(item.pins.get(lease, 0)):
                self.objects.unpin(lease, item)

    @handles(requests.CheckPins)
    def _check_pins(self, client: ClientId, request: requests.CheckPins) -> bool:
        lease = (client, request.request)
        return all(self._is_pinned(lease, handle) for handle in request.handles)

    @handles(requests.Reserve)
    def _reserve(self, client: ClientId, request: requests.Reserve) -> Later | None:
        lease, amounts = (client, request.request), _amounts(request.items)
        budget, ticket = self.objects.budget, (client, request.seq)
        for kind, nbytes in amounts.items():
            budget.check_fits(kind, budget.reservation_of(lease, kind) + nbytes)
        if not request.queue:
            budget.reserve(lease, amounts, ticket=ticket)
            return None
        budget.enqueue(QueuedReservation(ticket, lease, amounts, self._share_of(lease)))
        return LATER  # `_settle` answers, at once if there is space

    @handles(requests.Unreserve)
    def _unreserve(self, client: ClientId, request: requests.Unreserve) -> None:
        lease, amounts = (client, request.request), _amounts(request.items)
        ticket = (client, request.ticket)
        if self._drop_pending(lambda entry: (entry[0], entry[1].seq) == ticket) or (
            self.objects.budget.cancel(ticket)
        ):
            self._fail(client, request.ticket, RELEASED)
        elif request.ticket == NO_REPLY:
            self.objects.budget.give_back(lease, amounts)
        else:
            self.objects.budget.take_back(lease, amounts, ticket=ticket)

    @handles(requests.AcquirePermit)
    def _enter(self, client: ClientId, request: requests.AcquirePermit) -> Later | int:
        ticket, lease = (client, request.seq), (client, request.request)
        share = self._share_of(lease)
        entry = PermitRequest(
            *(ticket, lease, request.semaphore, request.limit, share), number=request.number
        )
        is_free = self.semaphores.acquire(entry, queue=request.queue)
        return self.semaphores.num_left(entry) if is_free else LATER

    @handles(requests.ReleasePermit)
    def _leave(self, client: ClientId, request: requests.ReleasePermit) -> None:
        ticket = (client, request.ticket) if request.ticket != NO_REPLY else None
        lease = (client, request.request)
        waiting = self.semaphores.release(lease, request.semaphore, ticket=ticket)
        if waiting is not None:
            self._fail(*waiting, RELEASED)

    @handles(requests.Accept)
    def _accept(self, _: ClientId, request: requests.Accept) -> bool:
        leases = [
            (client, request.request)
            for client in self._clients
            if self.objects.holds(lease := (client, request.request)) or self.early.has_any(lease)
        ]
        for lease in leases:
            for semaphore in request.semaphores:
                if not self.semaphores.is_waiting(lease, semaphore):
                    self.semaphores.release(lease, semaphore)
        return bool(leases)

    @handles(requests.Delete)
    def _delete(self, _: ClientId, request: requests.Delete) -> list[bool]:
        return [self._delete_one(ContentKey(key)) for key in request.keys]

    @handles(requests.Evict)
    def _evict(self, _: ClientId, request: requests.Evict) -> Evicted:
        return Evicted(*self.objects.evict(request.kind, request.nbytes))

    @handles(requests.Take)
    def _take(self, client: ClientId, request: requests.Take) -> Later:
        self._clients[client].is_worker |= request.role == "make"
        self.flights.worker_idle(client, request.seq, now_s=self._now_s, role=request.role)
        return LATER

    @handles(requests.Finish)
    def _finish(self, client: ClientId, request: requests.Finish) -> None:
        self.flights.finish(client, request, now_s=self._now_s)

    @handles(requests.Renew)
    def _renew(self, client: ClientId, request: requests.Renew) -> None:
        self.flights.jobs.renew(client, request.job, now_s=self._now_s)

    @handles(requests.List)
    def _list(self, _: ClientId, request: requests.List) -> list[ObjectInfo]:
        return self._report.objects(request.kind, limit=request.limit)

    @handles(requests.ListItems)
    def _list_items(self, _: ClientId, request: requests.ListItems) -> ItemPage:
        return self.objects.catalogue.page(request.after)

    @handles(requests.WatchItems)
    def _watch_items(self, client: ClientId, request: requests.WatchItems) -> Later:
        self._watchers[client] = request
        return LATER  # `_settle` answers, at once if there are changes

    @handles(requests.FindItems)
    def _find_items(self, _: ClientId, request: requests.FindItems) -> list[StoredItem]:
        return self.objects.catalogue.find(request.names)

    @handles(requests.Clients)
    def _list_clients(self, _: ClientId, __: requests.Clients) -> list[ClientInfo]:
        return self._report.clients()

    @handles(requests.Tenants)
    def _list_tenants(self, _: ClientId, __: requests.Tenants) -> list[TenantInfo]:
        return self._report.tenants(self._share_of)

    @handles(requests.Stat)
    def _stat(self, _: ClientId, __: requests.Stat) -> Statistics:
        return self.statistics()

    @handles(requests.PushMetrics)
    def _push_metrics(self, client: ClientId, request: requests.PushMetrics) -> None:
        self.metrics.push(client, request.source, request.readings)

    @handles(requests.ReadMetrics)
    def _read_metrics(self, _: ClientId, __: requests.ReadMetrics) -> list[Reading]:
        return self.metrics.total()

    def validate(self) -> None:
        """Check every invariant; for tests."""
        self.objects.validate()
        self.flights.validate()
        self.semaphores.validate()
        if any(not self._clients[client].connected for client, _ in self._pending):
            raise StoreError("a client that was lost still waits for room")
        for item in self.objects:
            for client, _ in [*item.pins, *([item.writer] if item.writer else [])]:
                if client and client not in self._clients:
                    raise StoreError("a client that is dead holds an object")

    # Inner steps

    def _is_pinned(self, lease: Lease, handle: Handle) -> bool:
        if handle.segment != self.objects.segment:
            return False
        if self.early.has_ended(lease, handle.generation):
            return True
        try:
            (item,) = self.objects.resolve_sealed([handle])
        except StaleHandle:
            return False
        return lease in item.pins

    def _release_all(self, lease: Lease) -> None:
        """Release a request; its unanswered calls fail."""
        self.early.forget(lease)
        for client, seq in self.objects.budget.drop(lease):
            self._fail(client, seq, RELEASED)
        for client, create in self._drop_pending(
            lambda entry: (entry[0], entry[1].request) == lease
        ):
            self._fail(client, create.seq, RELEASED)
        self._retire(lease)
        self.objects.drop_lease(lease)
        self._shares.get(lease[0], {}).pop(lease[1], None)

    def _retire(self, lease: Lease) -> None:
        """End a request. Its permits stay as long as jobs run for it alone."""
        if lease in self.semaphores:
            for ticket in self.semaphores.retire(lease, self.flights.running_for(lease)):
                self._fail(*ticket, RELEASED)
        self.flights.stop_waiting(lease)

    def _delete_one(self, key: ContentKey) -> bool:
        found = self.objects.find(key)
        if found is None or found.state is not ObjectState.SEALED:
            return False
        self.objects.delete(found)
        return True

    def _settle(self) -> Replies:
        """Serve the waiting requests that can proceed; return all replies since the last call."""
        self.flights.hand_on(self.objects.take_orphaned(), now_s=self._now_s)
        for reservation in self.objects.budget.reserve_queued():
            self._reply(*reservation.ticket, None)
        for entry in self.semaphores.settle(self.flights.jobs.is_running):
            self._reply(*entry.ticket, self.semaphores.num_left(entry))
        if self.objects.take_freed():
            self.flights.place_waiting(now_s=self._now_s)
            self._retry_creates()
            self.objects.take_freed()  # space that these took and returned does not count as freed
            # A job that got its extent, and that no worker can take, leaves its key to a request.
            self.flights.hand_on(self.objects.take_orphaned(), now_s=self._now_s)
        for answer in self.flights.take_answers():
            self._reply(*answer)
        if self._watchers:
            self._report_changes()
        outbox, self._outbox = self._outbox, []
        return outbox

    def _report_changes(self) -> None:
        """Answer the clients that wait for other changes of items than the latest."""
        catalogue = self.objects.catalogue
        for client, call in list(self._watchers.items()):
            if call.after != catalogue.seq:
                del self._watchers[client]
                self._reply(client, call.seq, catalogue.changes_after(call.after))

    def _drop_pending(self, is_dropped: Callable[[_Pending], bool]) -> list[_Pending]:
        """Remove waiting `Create`s and return them."""
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
                if result is not LATER:
                    self._reply(client, create.seq, result)

    def _fail(self, client: ClientId, seq: int, error: AfferentError) -> None:
        self._reply(client, seq, None, self.holders.failure_of(error))

    def _reply(
        self, client: ClientId, seq: int, result: object, failure: Failure | None = None
    ) -> None:
        if client in self._clients and self._clients[client].connected:
            self._outbox.append((client, Reply(seq, msgspec.Raw(encode(result)), failure)))


def _amounts(items: Sequence[ReserveItem] | Sequence[CreateItem]) -> Amounts:
    """Return the bytes of each kind, rounded up."""
    amounts: dict[ObjectKind, int] = {}
    for item in items:
        amounts[item.kind] = amounts.get(item.kind, 0) + round_up(item.nbytes)
    return amounts


check_all()
