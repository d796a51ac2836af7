"""The store's verbs as methods, each written once for all clients.

A method builds its message, and the client's ``_call`` has it answered: in a `Store` that gives the
result, in an `AsyncDaemonStore` something to await. So the one's ``store.stat()`` is the other's
``await store.stat()``, with the same arguments, checks and types.
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

from msgspec import Struct

from afferent.errors import NotPermitted
from afferent.quota.shares import Share
from afferent.store.arena import ArenaMap
from afferent.store.block import codec
from afferent.store.client.views import VIEWS, RequestViews
from afferent.store.protocol import requests
from afferent.store.protocol.items import CreateItem, ReserveItem, SealItem, Wanted
from afferent.store.protocol.refusals import listed
from afferent.store.protocol.requests import NO_REPLY, Request
from afferent.store.protocol.results import (
    ClientInfo,
    Evicted,
    ObjectInfo,
    Order,
    Outcome,
    Role,
    Statistics,
    TenantInfo,
)
from afferent.telemetry.readings import Reading
from afferent.types import Failure, Handle, ObjectKind, Span

if TYPE_CHECKING:
    from afferent.store.client.async_store import AsyncDaemonStore
    from afferent.store.client.store import Store

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
P = ParamSpec("P")

DEFAULT_TIMEOUT_S = 10.0


class Call(Struct, Generic[Result], frozen=True):
    """A request, and how long its answer is waited for; ``None`` for ever."""

    request: Request[Result]
    timeout_s: float | None = DEFAULT_TIMEOUT_S


class Verb(Protocol[P, Result_co]):
    """The type of a method that is called in one store, and awaited in the other."""

    @overload
    def __get__(self, store: Store, owner: object = None) -> Callable[P, Result_co]: ...

    @overload
    def __get__(
        self, store: AsyncDaemonStore, owner: object = None
    ) -> Callable[P, Coroutine[Any, Any, Result_co]]: ...


def verb(build: Callable[Concatenate[Any, P], Call[Result]]) -> Verb[P, Result]:
    """A method of every client, by how its call is built."""

    @functools.wraps(build)
    def method(store: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        return store._call(build(store, *args, **kwargs))

    return cast("Verb[P, Result]", method)  # a function is bound like that


class Verbs(ABC):
    """What any store can be asked.

    Raises:
        StoreUnavailable: From any verb: the store is gone or restarts. Nothing is held any more;
            try again.
        DeadlineExceeded: From any verb: no answer within ``timeout_s``.
    """

    _arena: ArenaMap

    def __init__(self) -> None:
        self._next_seq = itertools.count(1).__next__
        self._request_views = RequestViews()

    def introduce(self, request: str, share: Share) -> None:
        """Say whose request it is, before it queues for anything; never fails.

        Of what is queued for, each tenant gets its share. It is forgotten with the request.
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
            StoreRestarted: The object was lost with a former life of the store.
            FormatError: It holds no tree.
        """
        return self._request_views.open(
            *(request, self.block(handle), handle),
            tensors=tensors,
            max_header_nbytes=max_header_nbytes,
        )

    def _pin_views(self, request: str, handles: Sequence[Handle] | None) -> None:
        """Give pins of their own to arrays that outlive the request's.

        The message goes before that of the release, so the memory is pinned all the time.
        """
        by_segment: dict[int, list[Handle]] = {}
        # Kept to the end: the release of an array that goes before could overtake its pin.
        alive = self._request_views.take(request, handles)
        for handle, root in alive:
            weakref.finalize(root, self._pin_dropper(), handle).atexit = False
            by_segment.setdefault(handle.segment, []).append(handle)
        for pinned in by_segment.values():  # those of a former life are refused, as a batch
            self._tell(requests.Get(NO_REPLY, VIEWS, pinned))
        alive.clear()

    @abstractmethod
    def _pin_dropper(self) -> Callable[[Handle], None]:
        """Return what is called, in any thread, when an array with a pin of its own is gone."""

    # Objects

    @verb
    def acquire(self, request: str, items: Sequence[Wanted]) -> Call[list[Outcome]]:
        """Pin what exists; see to it that what does not is made, once, whoever asks.

        Follow with `wait` for what is ``in_flight`` or ``scheduled``; write and `seal` that of
        which this request is the ``owner``.
        """
        return Call(requests.Acquire(self._next_seq(), request, listed("items", items)))

    @verb
    def wait(
        self, request: str, keys: Sequence[bytes], *, timeout_s: float = 60.0
    ) -> Call[list[Outcome]]:
        """What became of keys that were ``in_flight`` or ``scheduled``, once all have an end.

        It returns early when the maker of one of them is gone and the request is its ``owner`` now;
        others may still be ``in_flight``.
        """
        return Call(requests.Wait(self._next_seq(), request, listed("keys", keys)), timeout_s)

    @verb
    def create(
        self, request: str, items: Sequence[CreateItem], *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Call[list[Handle]]:
        """Blocks to write, all or none. What is written by nobody else is found by nobody else:
        without a key, only who has the handle can `get` the object.

        With a reservation that covers them it waits until there are extents that are long enough.

        Raises:
            StoreFull: There is no room now.
            ArenaTooSmall: There never is.
        """
        return Call(requests.Create(self._next_seq(), request, listed("items", items)), timeout_s)

    @verb
    def seal(self, request: str, items: Sequence[SealItem]) -> Call[list[Handle]]:
        """End the writing, of all or none; the request has a pin on each.

        Raises:
            NotPermitted: One is not the request's to seal.
            StaleHandle: What one was computed from is not pinned any more.
        """
        return Call(requests.Seal(self._next_seq(), request, listed("items", items)))

    @verb
    def abort(
        self, request: str, handles: Sequence[Handle], *, failure: Failure | None = None
    ) -> Call[None]:
        """Give up the writing. Who waits for the objects fails with ``failure``, if there is one,
        and may make them otherwise.
        """
        return Call(requests.Abort(self._next_seq(), request, listed("handles", handles), failure))

    def discard(self, request: str, handles: Sequence[Handle]) -> None:
        """`abort`, without waiting for the answer; never fails."""
        self._tell(requests.Abort(NO_REPLY, request, listed("handles", handles)))

    @verb
    def get(
        self, request: str, handles: Sequence[Handle], *, also_for: Sequence[int] = ()
    ) -> Call[None]:
        """Pin sealed objects, all or none.

        Args:
            also_for: Clients, by their `client_number`, for each of which they are pinned too, in
                the same step and under the same name of a request. Each then looks at
                `block`, and lets go with its own `release` or `forget`: so **tell each of them**,
                also when this call missed its deadline. Its pins go when it dies.

        Raises:
            StaleHandle: One of them is gone.
            StoreRestarted: They were lost with a former life of the store.
            ClientGone: One of ``also_for`` is not connected, or is again under a new number.
        """
        return Call(
            requests.Get(
                self._next_seq(), request, listed("handles", handles), listed("also_for", also_for)
            )
        )

    @verb
    def release(self, request: str, handles: Sequence[Handle] | None = None) -> Call[None]:
        """Take back one pin of each, or drop all that the request holds, and has reserved.

        Arrays of an `ItemCache` that are still alive keep their memory pinned until they are gone.
        """
        some = None if handles is None else listed("handles", handles)
        self._pin_views(request, some)
        return Call(requests.Release(self._next_seq(), request, some))

    def unpin(self, request: str, handles: Sequence[Handle]) -> None:
        """`release` of these, without waiting for the answer; never fails."""
        self._pin_views(request, handles)
        self._tell(requests.Release(NO_REPLY, request, list(handles)))

    def forget(self, request: str) -> None:
        """Drop all that the request holds, without waiting for the answer; never fails.

        A store that is gone holds nothing.
        """
        self._pin_views(request, None)
        self._tell(requests.Release(NO_REPLY, request, None))

    @verb
    def delete(self, keys: Sequence[bytes]) -> Call[list[bool]]:
        """Take sealed objects away by key; whether each was there."""
        return Call(requests.Delete(self._next_seq(), listed("keys", keys)))

    @verb
    def evict(self, kind: ObjectKind, nbytes: int | None = None) -> Call[Evicted]:
        """Evict the least recently used of a kind that nobody has pinned: some bytes, or all."""
        return Call(requests.Evict(self._next_seq(), kind, nbytes))

    # Room

    @verb
    def reserve(
        self,
        request: str,
        items: Sequence[ReserveItem],
        *,
        queue: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Call[None]:
        """Reserve room for objects that will be created or acquired: all or nothing.

        Without ``queue`` it is reserved at once or not at all. A call that is given up, or
        cancelled, leaves nothing reserved.

        Raises:
            StoreFull: Others hold the room, or too many wait for it.
            ArenaTooSmall: There never is that much.
            DeadlineExceeded: It could not be had in time, and is not waited for any more.
        """
        return Call(
            requests.Reserve(self._next_seq(), request, listed("items", items), queue), timeout_s
        )

    @verb
    def unreserve(self, request: str, items: Sequence[ReserveItem]) -> Call[None]:
        """Return room that was reserved, as far as it has not been used."""
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
    ) -> Call[None]:
        """Hold ``number`` of the ``limit`` permits of a semaphore, which is one for all processes.

        They are given by fair shares, and given back by `release_permit`, or when the request is
        released or its process ends; then they are free once the jobs that still run for this
        request alone have ended. A call that is given up, or cancelled, holds none.

        Args:
            semaphore: A name, such as ``"preprocess"``.
            queue: Wait for them; otherwise they are there now, or not.
            number: How many; more than the limit are all.

        Raises:
            NoPermitLeft: All are held, or too many wait for one.
            DeadlineExceeded: There was none in time, and it is not waited for any more.
            NotPermitted: The request has one, or waits for it, already.
        """
        return Call(
            requests.AcquirePermit(self._next_seq(), request, semaphore, limit, queue, number),
            timeout_s,
        )

    def release_permit(self, request: str, semaphore: str) -> None:
        """Give what it has of a semaphore back at once, or stop waiting for it; never fails."""
        self._tell(requests.ReleasePermit(NO_REPLY, request, semaphore))

    @verb
    def accept(self, request: str, semaphores: Sequence[str] = ()) -> Call[bool]:
        """Say that an engine has read media of a request, whichever client's the request is.

        Args:
            semaphores: Whose permits the request gives back.

        Returns:
            Whether the request is there: it has not been released, and holds something.
        """
        return Call(requests.Accept(self._next_seq(), request, tuple(semaphores)))

    def accepted(self, request: str, semaphores: Sequence[str]) -> None:
        """`accept`, without waiting for the answer; never fails."""
        self._tell(requests.Accept(NO_REPLY, request, tuple(semaphores)))

    # Jobs

    @verb
    def take(self, role: Role = "make") -> Call[Order]:
        """Wait for a job, for ever if need be.

        A call that is cancelled may have been given one: it is handed on when this client is gone.
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
        """End a job: its object is sealed, or has failed for all who wait for it."""
        seq = self._next_seq()
        return Call(requests.Finish(seq, order.job, used_nbytes, failure, listed("spans", spans)))

    def renew(self, order: Order) -> None:
        """Have the time of a fetch begin anew, without waiting for the answer; never fails."""
        self._tell(requests.Renew(NO_REPLY, order.job))

    # Questions, and what processes have counted

    @verb
    def stat(self) -> Call[Statistics]:
        """How the store is; it costs nothing, however many objects there are."""
        return Call(requests.Stat(self._next_seq()))

    @verb
    def list_objects(
        self, kind: ObjectKind | None = None, *, limit: int = 100
    ) -> Call[list[ObjectInfo]]:
        """The largest objects."""
        return Call(requests.List(self._next_seq(), kind, limit))

    @verb
    def list_clients(self) -> Call[list[ClientInfo]]:
        """Who holds what."""
        return Call(requests.Clients(self._next_seq()))

    @verb
    def list_tenants(self) -> Call[list[TenantInfo]]:
        """Whose requests wait for room, permits or workers, or have room reserved."""
        return Call(requests.Tenants(self._next_seq()))

    @verb
    def push_metrics(self, source: int, readings: Sequence[Reading]) -> Call[None]:
        """Say all that this process has counted so far; see `telemetry.pushing`."""
        return Call(requests.PushMetrics(self._next_seq(), source, listed("readings", readings)))

    @verb
    def read_metrics(self) -> Call[list[Reading]]:
        """The sums of what all processes have counted, those that are gone included."""
        return Call(requests.ReadMetrics(self._next_seq()))

    # What is behind it

    def check_writable(self) -> None:
        """Refuse what would write into the arena, before anything is created for it.

        Raises:
            NotPermitted: The store was opened without ``writable=True``.
        """
        if not self._arena.writable:
            raise NotPermitted("this connection only reads: open the store with writable=True")

    @abstractmethod
    def block(self, handle: Handle) -> memoryview:
        """The object's bytes in the arena, without a copy. Valid while this process holds it.

        Raises:
            StoreRestarted: It was lost with a former life of the store.
            StaleHandle: No handle that the store gave out.
        """

    @property
    @abstractmethod
    def capacity_nbytes(self) -> int:
        """The arena's size."""

    @property
    @abstractmethod
    def client_number(self) -> int:
        """What the store calls this client, for the ``also_for`` of others. Never given to another
        one; a new one when a lost connection comes back.
        """

    @abstractmethod
    def _call(self, call: Call[Any]) -> Any:
        """Send a request and have its answer: the result, or an awaitable of it."""

    @abstractmethod
    def _tell(self, request: Request[Any]) -> None:
        """Send a request whose reply nobody waits for; never fails."""
