"""Verbs of the store as methods, each written once for all clients.

A method builds its message, and the client's ``_call`` gets the answer. A `Store` returns the
result; an `AsyncDaemonStore` returns an awaitable of it. So ``store.stat()`` of one is
``await store.stat()`` of the other, with the same arguments, checks and types.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    overload,
)

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from afferent.admission.shares import Share
from afferent.errors import NotPermitted
from afferent.store.arena import ArenaMap
from afferent.store.block import codec
from afferent.store.client.views import VIEWS, RequestViews
from afferent.store.protocol import requests
from afferent.store.protocol.items import SealItem, Wanted, in_messages
from afferent.store.protocol.refusals import listed
from afferent.store.protocol.requests import NO_REPLY, Request
from afferent.store.protocol.results import (
    ClientInfo,
    Evicted,
    ItemChanges,
    ItemPage,
    ObjectInfo,
    Order,
    Outcome,
    Role,
    Statistics,
    StoredItem,
    TenantInfo,
)
from afferent.telemetry.readings import Reading
from afferent.types import CreateItem, Failure, Handle, ObjectKind, ReserveItem, Span

if TYPE_CHECKING:
    from afferent.store.client.async_store import AsyncDaemonStore
    from afferent.store.client.store import Store

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
P = ParamSpec("P")

DEFAULT_TIMEOUT_S = 10.0


class Call(Struct, Generic[Result], frozen=True):
    """Request with the timeout for its answer; ``None`` waits without limit."""

    request: Request[Result]
    timeout_s: float | None = DEFAULT_TIMEOUT_S


class Verb(Protocol[P, Result_co]):
    """Type of a method that one store calls, and the other awaits."""

    @overload
    def __get__(self, store: Store, owner: object = None) -> Callable[P, Result_co]: ...

    @overload
    def __get__(
        self, store: AsyncDaemonStore, owner: object = None
    ) -> Callable[P, Coroutine[Any, Any, Result_co]]: ...


def verb(build: Callable[Concatenate[Any, P], Call[Result]]) -> Verb[P, Result]:
    """Make a method of every client from a function that builds its call."""

    @functools.wraps(build)
    def method(store: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        return store._call(build(store, *args, **kwargs))

    return cast("Verb[P, Result]", method)  # a function is bound like that


class Verbs(ABC):
    """Verbs of any store.

    Raises:
        StoreUnavailable: From any verb: the store is gone or restarts. All pins are lost;
            try again.
        DeadlineExceeded: From any verb: no answer within ``timeout_s``.
    """

    _arena: ArenaMap

    def __init__(self) -> None:
        self._next_seq = itertools.count(1).__next__
        self._request_views = RequestViews()

    def introduce(self, request: str, share: Share) -> None:
        """Set a request's tenant share, before the request queues for anything; never fails.

        Queues are fair between tenants by their shares. The release of the request drops it.
        """
        self._tell(requests.Introduce(NO_REPLY, request, share))

    def view_for(
        self,
        request: str,
        handle: Handle,
        *,
        tensors: codec.Library = "numpy",
        max_header_nbytes: int = codec.MAX_HEADER_NBYTES,
    ) -> Any:
        """Return the tree in an object that the request has pinned: arrays over the arena.

        Their memory stays pinned for as long as they live, also after the request's release.

        Raises:
            StoreRestarted: The object was lost with an earlier epoch of the store.
            FormatError: It holds no tree.
        """
        # All arrays of the tree reference this one, and nothing else does.
        root = self.bytes_for(request, handle)
        return codec.view(root.data, tensors=tensors, max_header_nbytes=max_header_nbytes)

    def bytes_for(self, request: str, handle: Handle) -> NDArray[np.uint8]:
        """Return the bytes of an object that the request has pinned, ``(nbytes,)``, read-only.

        Their memory stays pinned for as long as the array lives, also after the request's release.

        Raises:
            StoreRestarted: The object was lost with an earlier epoch of the store.
        """
        return self._request_views.open(request, self.block(handle), handle)

    def _pin_views(self, request: str, handles: Sequence[Handle] | None) -> None:
        """Pin arrays that outlive the request's pins.

        This message precedes the release, so the memory is pinned without a gap.
        """
        by_segment: dict[int, list[Handle]] = {}
        # Kept to the end: the release of an array that goes before could overtake its pin.
        alive = self._request_views.take(request, handles)
        for handle, root in alive:
            weakref.finalize(root, self._pin_dropper(), handle).atexit = False
            by_segment.setdefault(handle.segment, []).append(handle)
        for pinned in by_segment.values():  # pins of an earlier epoch are refused, as a batch
            for some in in_messages(pinned):
                self._tell(requests.Get(NO_REPLY, VIEWS, list(some)))
        alive.clear()

    @abstractmethod
    def _pin_dropper(self) -> Callable[[Handle], None]:
        """Return the callback for collected arrays with their own pin; any thread may call it."""

    # Objects

    @verb
    def acquire(self, request: str, items: Sequence[Wanted]) -> Call[list[Outcome]]:
        """Pin existing objects, and have missing ones made once, however many requests need them.

        Follow with `wait` for the outcomes `InFlight` and `Scheduled`. Write and `seal` the objects
        with the outcome `Owner`.
        """
        return Call(requests.Acquire(self._next_seq(), request, listed("items", items)))

    @verb
    def wait(
        self, request: str, keys: Sequence[bytes], *, timeout_s: float = 60.0
    ) -> Call[list[Outcome]]:
        """Wait until all of these keys, `InFlight` or `Scheduled`, have an outcome.

        It returns early if a producer is gone and this request is now the `Owner`; other keys may
        still be `InFlight`.
        """
        return Call(requests.Wait(self._next_seq(), request, listed("keys", keys)), timeout_s)

    @verb
    def create(
        self, request: str, items: Sequence[CreateItem], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Call[list[Handle]]:
        """Create blocks to write, all or none.

        Without a key, only a holder of the handle can `get` the object. With a reservation that
        covers them, the call waits until there are long enough extents.

        Raises:
            StoreFull: There is no space now.
            ArenaTooSmall: The arena is too small for it.
        """
        return Call(requests.Create(self._next_seq(), request, listed("items", items)), timeout_s)

    @verb
    def seal(self, request: str, items: Sequence[SealItem]) -> Call[list[Handle]]:
        """End the writing of all or none; the request has a pin on each.

        Raises:
            NotPermitted: The request may not seal one of them.
            StaleHandle: An input of one of them is not pinned any more.
        """
        return Call(requests.Seal(self._next_seq(), request, listed("items", items)))

    @verb
    def abort(
        self, request: str, handles: Sequence[Handle], *, failure: Failure | None = None
    ) -> Call[None]:
        """Abandon the writing.

        Requests that wait for the objects fail with ``failure``; without one, they may make them.
        """
        return Call(requests.Abort(self._next_seq(), request, listed("handles", handles), failure))

    def discard(self, request: str, handles: Sequence[Handle]) -> None:
        """Call `abort` without waiting for the answer; never fails."""
        self._tell(requests.Abort(NO_REPLY, request, listed("handles", handles)))

    @verb
    def get(
        self, request: str, handles: Sequence[Handle], *, also_for: Sequence[int] = ()
    ) -> Call[None]:
        """Pin sealed objects, all or none.

        Args:
            also_for: Numbers of other clients (`client_number`). The objects are pinned for each of
                them in the same step, under the same request name. Each of them reads its `block`
                and releases it with its own `release` or `forget`. So **notify each of them**, also
                if this call misses its deadline. A client's pins end when it dies.

        Raises:
            StaleHandle: One of them is gone.
            StoreRestarted: They were lost with an earlier epoch of the store.
            ClientGone: One of ``also_for`` is not connected, or has reconnected under a new number.
        """
        return Call(
            requests.Get(
                self._next_seq(), request, listed("handles", handles), listed("also_for", also_for)
            )
        )

    @verb
    def release(self, request: str, handles: Sequence[Handle] | None = None) -> Call[None]:
        """Take back one pin of each, or release all pins and reservations of the request.

        Arrays of an `ItemCache` that are still alive keep their memory pinned until they are
        collected.
        """
        some = None if handles is None else listed("handles", handles)
        self._pin_views(request, some)
        return Call(requests.Release(self._next_seq(), request, some))

    def unpin(self, request: str, handles: Sequence[Handle]) -> None:
        """Call `release` with these handles, without waiting for the answer; never fails."""
        self._pin_views(request, handles)
        for some in in_messages(handles):
            self._tell(requests.Release(NO_REPLY, request, list(some)))

    def forget(self, request: str) -> None:
        """Release all of the request, without waiting for the answer; never fails.

        If the store is gone, there is nothing to release.
        """
        self._pin_views(request, None)
        self._tell(requests.Release(NO_REPLY, request, None))

    def release_early(self, request: str, handles: Sequence[Handle]) -> None:
        """Allow that the request's pins end when an engine has encoded the objects; never fails.

        See `report_encoded`. Without such a report, they end with the request.
        """
        for some in in_messages(handles):
            self._tell(requests.ReleaseEarly(NO_REPLY, request, list(some)))

    def report_encoded(self, keys: Sequence[bytes]) -> None:
        """Report items that an engine has encoded for one of its requests; never fails.

        For each item, one pin ends: the oldest of those that may (`release_early`).
        """
        for some in in_messages(keys):
            self._tell(requests.ReportEncoded(NO_REPLY, list(some)))

    @verb
    def check_pins(self, request: str, handles: Sequence[Handle]) -> Call[bool]:
        """Return whether the request has pinned these objects, and keys still lead to them.

        A pin that ended early counts.
        """
        return Call(requests.CheckPins(self._next_seq(), request, listed("handles", handles)))

    @verb
    def delete(self, keys: Sequence[bytes]) -> Call[list[bool]]:
        """Delete sealed objects by key; return for each whether it existed."""
        return Call(requests.Delete(self._next_seq(), listed("keys", keys)))

    @verb
    def evict(self, kind: ObjectKind, nbytes: int | None = None) -> Call[Evicted]:
        """Evict the least recently used unpinned objects of a kind: ``nbytes`` of them, or all."""
        return Call(requests.Evict(self._next_seq(), kind, nbytes))

    # Space

    @verb
    def reserve(
        self,
        request: str,
        items: Sequence[ReserveItem],
        *,
        queue: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Call[None]:
        """Reserve space for objects that will be created or acquired: all or nothing.

        Without ``queue``, it succeeds or fails at once. A call that times out or is cancelled
        leaves nothing reserved.

        Raises:
            StoreFull: Other requests use the space, or the queue is full.
            ArenaTooSmall: The arena is too small for it.
            DeadlineExceeded: The space was not available in time; the call is withdrawn.
        """
        return Call(
            requests.Reserve(self._next_seq(), request, listed("items", items), queue), timeout_s
        )

    @verb
    def unreserve(self, request: str, items: Sequence[ReserveItem]) -> Call[None]:
        """Return reserved space, as far as it has not been used."""
        return Call(requests.Unreserve(self._next_seq(), request, listed("items", items), 0))

    # Permits

    @verb
    def acquire_permit(
        self,
        request: str,
        semaphore: str,
        *,
        limit: int,
        queue: bool = True,
        number: int = 1,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Call[int]:
        """Take ``number`` of the ``limit`` permits of a semaphore, which all processes share.

        The queue is fair between tenants. `release_permit` returns the permits, and so does the end
        of the request or of its process, once the jobs that still run for this request alone have
        ended. A call that times out or is cancelled takes none.

        Args:
            semaphore: A name, such as ``"preprocess"``.
            queue: Wait for them; otherwise fail at once.
            number: Number of permits; above the limit, it means all of them.

        Returns:
            The number of permits that are left.

        Raises:
            NoPermitLeft: All are taken, or the queue is full.
            DeadlineExceeded: They were not available in time; the call is withdrawn.
            NotPermitted: The request has one, or waits for it, already.
        """
        return Call(
            requests.AcquirePermit(self._next_seq(), request, semaphore, limit, queue, number),
            timeout_s,
        )

    def release_permit(self, request: str, semaphore: str) -> None:
        """Return a request's permits of a semaphore, or stop waiting for them; never fails."""
        self._tell(requests.ReleasePermit(NO_REPLY, request, semaphore))

    @verb
    def accept(self, request: str, semaphores: Sequence[str] = ()) -> Call[bool]:
        """Report that an engine has read media of a request, which may belong to any client.

        Args:
            semaphores: Semaphores whose permits the request returns.

        Returns:
            Whether the request exists: it is not released, and pins or writes an object.
        """
        return Call(requests.Accept(self._next_seq(), request, tuple(semaphores)))

    def accepted(self, request: str, semaphores: Sequence[str]) -> None:
        """Call `accept` without waiting for the answer; never fails."""
        self._tell(requests.Accept(NO_REPLY, request, tuple(semaphores)))

    # Jobs

    @verb
    def take(self, role: Role = "make") -> Call[Order]:
        """Wait for a job, without a limit.

        A cancelled call may already have a job: another worker gets it when this client is gone.
        """
        return Call(requests.Take(self._next_seq(), role), None)

    @verb
    def finish(
        self,
        order: Order,
        *,
        used_nbytes: int = 0,
        failure: Failure | None = None,
        spans: Sequence[Span] = (),
    ) -> Call[None]:
        """End a job: seal its object, or report its failure to all waiting requests."""
        seq = self._next_seq()
        return Call(requests.Finish(seq, order.job, used_nbytes, failure, listed("spans", spans)))

    def renew(self, order: Order) -> None:
        """Restart the timeout of a fetch, without waiting for the answer; never fails."""
        self._tell(requests.Renew(NO_REPLY, order.job))

    # Queries, and metrics of processes

    @verb
    def stat(self) -> Call[Statistics]:
        """Return statistics, at constant cost for any number of objects."""
        return Call(requests.Stat(self._next_seq()))

    @verb
    def list_objects(
        self, kind: ObjectKind | None = None, *, limit: int = 100
    ) -> Call[list[ObjectInfo]]:
        """List the largest objects."""
        return Call(requests.List(self._next_seq(), kind, limit))

    @verb
    def list_items(self, after: int = 0) -> Call[ItemPage]:
        """List the media items: a page of them, and the position ``after`` of the next one.

        The changes after the first page's ``seq`` complete the list (`watch_items`).
        """
        return Call(requests.ListItems(self._next_seq(), after))

    @verb
    def watch_items(self, after: int) -> Call[ItemChanges]:
        """Wait for changes of media items after the change ``after``, without a limit.

        A client has one such call at a time: the answer to a former one does not come any more.
        """
        return Call(requests.WatchItems(self._next_seq(), after), None)

    @verb
    def find_items(self, names: Sequence[bytes]) -> Call[list[StoredItem]]:
        """Return the media items with these names that are in the store, of all tenants.

        Nothing is pinned: an item may be evicted at once.
        """
        return Call(requests.FindItems(self._next_seq(), listed("names", names)))

    @verb
    def list_clients(self) -> Call[list[ClientInfo]]:
        """List the clients with their pinned and reserved bytes."""
        return Call(requests.Clients(self._next_seq()))

    @verb
    def list_tenants(self) -> Call[list[TenantInfo]]:
        """List the tenants with waiting requests or reserved space."""
        return Call(requests.Tenants(self._next_seq()))

    @verb
    def push_metrics(self, source: int, readings: Sequence[Reading]) -> Call[None]:
        """Push all counters of this process; see `telemetry.pushing`."""
        return Call(requests.PushMetrics(self._next_seq(), source, listed("readings", readings)))

    @verb
    def read_metrics(self) -> Call[list[Reading]]:
        """Return the sums of the counters of all processes, including dead ones."""
        return Call(requests.ReadMetrics(self._next_seq()))

    # To be implemented

    def check_writable(self) -> None:
        """Refuse to write into the arena, before anything is created for it.

        Raises:
            NotPermitted: The store was opened without ``writable=True``.
        """
        if not self._arena.writable:
            raise NotPermitted("this connection only reads: open the store with writable=True")

    @abstractmethod
    def block(self, handle: Handle) -> memoryview:
        """Return the object's bytes in the arena, without a copy; valid while it is pinned.

        Raises:
            StoreRestarted: It was lost with an earlier epoch of the store.
            StaleHandle: The handle is not from this store.
        """

    @property
    @abstractmethod
    def capacity_nbytes(self) -> int:
        """Size of the arena."""

    @property
    @abstractmethod
    def client_number(self) -> int:
        """Number of this client, for the ``also_for`` of other clients.

        Never given to another client; a reconnected client gets a new one.
        """

    @abstractmethod
    def _call(self, call: Call[Any]) -> Any:
        """Send a request; return its result, or an awaitable of it."""

    @abstractmethod
    def _tell(self, request: Request[Any]) -> None:
        """Send a request without waiting for its reply; never fails."""
