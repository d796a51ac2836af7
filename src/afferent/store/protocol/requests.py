"""Verbs of the store: requests of clients, and the types of the results.

A verb is defined here once: its fields, its result (``Request[...]``), whether it waits, and its
withdrawal. The daemon has a handler for each class (`afferent.store.state.machine`), and all
clients have a method (`afferent.store.client.verbs`).

Every request carries ``seq``, which its reply repeats. A verb works on many objects in one round
trip. Verbs that wait are answered later, out of order.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, TypeVar

from msgspec import Meta, Struct

from afferent.admission.shares import Share
from afferent.store.protocol.items import MAX_ITEMS, ItemName, SealItem, Wanted
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
from afferent.telemetry.readings import MAX_METRICS, Reading
from afferent.types import (
    CreateItem,
    Failure,
    Handle,
    KeyBytes,
    Nbytes,
    NonNegative,
    ObjectKind,
    RequestId,
    ReserveItem,
    Span,
)

Result = TypeVar("Result")

NO_REPLY = 0
"""The ``seq`` of a request whose sender does not wait for a reply; only failures are sent."""
MAX_ALSO_FOR = 256

_Handles = Annotated[list[Handle], Meta(max_length=MAX_ITEMS)]
_Keys = Annotated[list[KeyBytes], Meta(max_length=MAX_ITEMS)]
_Readings = Annotated[list[Reading], Meta(max_length=MAX_METRICS)]

SemaphoreName = Annotated[str, Meta(min_length=1, max_length=128)]
"""Name such as ``"preprocess"``, or ``"tenant/NAME"`` with the family before the slash."""


class Request(Struct, Generic[Result], array_like=True, forbid_unknown_fields=True):
    """Verb; its answer is a `Result`."""

    waits: ClassVar[bool] = False
    """Whether its answer may come later; other verbs are answered at once."""

    seq: int

    def withdrawal(self) -> Request[None] | None:
        """Return the request that withdraws this one when its caller no longer waits.

        It cancels reservations, permits and waiting; ``None`` if there is nothing to withdraw.
        """
        return None


class Introduce(Request[None], tag="introduce"):
    """Set the tenant share of a request, for fair queues; the default is the default tenant's."""

    request: RequestId
    share: Share


class Acquire(Request[list[Outcome]], tag="acquire"):
    """Pin existing objects, and start the production of missing ones."""

    request: RequestId
    items: Annotated[list[Wanted], Meta(max_length=MAX_ITEMS)]


class Wait(Request[list[Outcome]], tag="wait"):
    """Wait until each key, acquired before, is made or has failed.

    It is answered early when a producer is gone and one of the keys is now this request's to make:
    `Owner`, and `InFlight` for keys that others still make.
    """

    waits: ClassVar[bool] = True

    request: RequestId
    keys: _Keys


class Create(Request[list[Handle]], tag="create"):
    """Allocate blocks to write, all or none."""

    request: RequestId
    items: Annotated[list[CreateItem], Meta(max_length=MAX_ITEMS)]

    def withdrawal(self) -> Request[None]:
        return Unreserve(NO_REPLY, self.request, [], self.seq)


class Seal(Request[list[Handle]], tag="seal"):
    """End the writing of all or none; pin each for the request and return trimmed handles."""

    request: RequestId
    items: Annotated[list[SealItem], Meta(max_length=MAX_ITEMS)]


class Abort(Request[None], tag="abort"):
    """Abandon the writing. Waiting requests fail with ``failure``, or without one may make it."""

    request: RequestId
    handles: _Handles
    failure: Failure | None = None


class Get(Request[None], tag="get"):
    """Pin sealed objects by handle, all or none.

    They are pinned for the sender, and once for each client in ``also_for``, under the same request
    name.
    """

    request: RequestId
    handles: _Handles
    also_for: Annotated[list[NonNegative], Meta(max_length=MAX_ALSO_FOR)] = []


class Release(Request[None], tag="release"):
    """Take back one pin of each; without ``handles``, release all objects of the request."""

    request: RequestId
    handles: _Handles | None


class ReleaseEarly(Request[None], tag="release_early"):
    """Allow that the request's pins of sealed objects end when an engine has encoded them."""

    request: RequestId
    handles: _Handles


class ReportEncoded(Request[None], tag="report_encoded"):
    """Report that an engine has encoded items, once for each of its requests.

    For each key, the oldest pin that may end early (`ReleaseEarly`) ends.
    """

    keys: _Keys


class CheckPins(Request[bool], tag="check_pins"):
    """Whether these objects are what the request has pinned: keys still lead to them.

    A pin that ended early counts: an engine had encoded the object before that.
    """

    request: RequestId
    handles: _Handles


class Reserve(Request[None], tag="reserve"):
    """Reserve space for objects that the request will create or acquire, all or nothing.

    With ``queue`` it waits in a fair queue until the space is reserved.
    """

    waits: ClassVar[bool] = True

    request: RequestId
    items: Annotated[list[ReserveItem], Meta(max_length=MAX_ITEMS)]
    queue: bool

    def withdrawal(self) -> Request[None]:
        return Unreserve(NO_REPLY, self.request, self.items, self.seq)


class Unreserve(Request[None], tag="unreserve"):
    """Withdraw a `Reserve` with this ``ticket`` (its ``seq``), answered or not.

    It returns the unspent bytes, up to the amounts of ``items``; nothing if the call was refused. A
    waiting `Create` is withdrawn in the same way. With ``NO_REPLY`` as ticket it returns bytes from
    any call of the request.
    """

    request: RequestId
    items: Annotated[list[ReserveItem], Meta(max_length=MAX_ITEMS)]
    ticket: int


class AcquirePermit(Request[int], tag="acquire_permit"):
    """Take ``number`` of the ``limit`` permits of a semaphore, which all clients share.

    The reply is the number of permits that are left.

    With ``queue`` it waits in a fair queue. The request has the permits until it returns them, or
    until it is released and its jobs have ended.
    """

    waits: ClassVar[bool] = True

    request: RequestId
    semaphore: SemaphoreName
    limit: Annotated[int, Meta(ge=1, le=2**31)]
    queue: bool
    number: Annotated[int, Meta(ge=1, le=2**31)] = 1

    def withdrawal(self) -> Request[None]:
        return ReleasePermit(NO_REPLY, self.request, self.semaphore, self.seq)


class ReleasePermit(Request[None], tag="release_permit"):
    """Return a permit, or stop waiting for one; with a ``ticket``, only that of this call."""

    request: RequestId
    semaphore: SemaphoreName
    ticket: int = NO_REPLY


class Accept(Request[bool], tag="accept"):
    """Whether a request of any client exists; an engine has read its media.

    The request returns its permits of these semaphores, as it needs them no more.
    """

    request: RequestId
    semaphores: Annotated[tuple[SemaphoreName, ...], Meta(max_length=8)] = ()


class Delete(Request[list[bool]], tag="delete"):
    """Delete sealed objects by key; return for each whether it existed.

    Requests with a pin keep the object until they release it.
    """

    keys: _Keys


class Evict(Request[Evicted], tag="evict"):
    """Evict the least recently used objects of a kind, ``nbytes`` of them or all."""

    kind: ObjectKind
    nbytes: Nbytes | None


class List(Request[list[ObjectInfo]], tag="list"):
    """List the largest objects."""

    kind: ObjectKind | None
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS)]


class ListItems(Request[ItemPage], tag="list_items"):
    """List the media items that were stored after the change with this number: a page of them."""

    after: NonNegative


class WatchItems(Request[ItemChanges], tag="watch_items"):
    """Wait for changes of media items after the change with this number.

    Each client has one such call at a time; a new one replaces it.
    """

    waits: ClassVar[bool] = True

    after: NonNegative


class FindItems(Request[list[StoredItem]], tag="find_items"):
    """Return the media items with these names that are in the store. Nothing is pinned."""

    names: Annotated[list[ItemName], Meta(max_length=MAX_ITEMS)]


class Clients(Request[list[ClientInfo]], tag="clients"):
    """List the connected clients, and lost clients that still hold pins."""


class Tenants(Request[list[TenantInfo]], tag="tenants"):
    """List the tenants with waiting requests or reserved space."""


class Take(Request[Order], tag="take"):
    """Wait for a job: to ``make`` an object, to ``fetch`` one, or to ``keep`` one in the tier."""

    waits: ClassVar[bool] = True

    role: Role = "make"


class Finish(Request[None], tag="finish"):
    """End a job, with the number of written bytes or the failure."""

    job: NonNegative
    used_nbytes: NonNegative
    failure: Failure | None
    spans: Annotated[list[Span], Meta(max_length=64)]


class Renew(Request[None], tag="renew"):
    """Restart the timeout of a fetch, for example one that waits for another node.

    No-op if the client does not have the job, or if the job is not a fetch: a process that decodes
    clients' media must not extend its own timeout.
    """

    job: NonNegative


class Stat(Request[Statistics], tag="stat"):
    """Return statistics, at constant cost for any number of objects."""


class PushMetrics(Request[None], tag="push_metrics"):
    """Push all counters of a process; ``source`` is a number that it keeps for its life."""

    source: NonNegative
    readings: _Readings


class ReadMetrics(Request[list[Reading]], tag="read_metrics"):
    """Return the counters of all processes, including dead ones."""


VERBS: tuple[type[Request[Any]], ...] = tuple(Request.__subclasses__())
"""All verbs, in the order of their definitions."""
