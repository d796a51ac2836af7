"""The verbs of the store: what a client asks, and of what type the answer is.

A verb is written here once: its fields, its result (``Request[...]``), whether it waits, and what
takes it back. `VERBS` lists them. The daemon has a handler for each, by its class
(`afferent.store.state.machine`), and all clients have a method (`afferent.store.client.verbs`).

Every request carries ``seq``, which its reply repeats. A verb works on many objects in one round
trip. Those that wait are answered when there is something to say, out of order.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, TypeVar

from msgspec import Meta, Struct

from afferent.quota.shares import Share
from afferent.store.protocol.items import (
    MAX_ITEMS,
    CreateItem,
    Nbytes,
    ReserveItem,
    SealItem,
    Wanted,
)
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
from afferent.telemetry.readings import MAX_METRICS, Reading
from afferent.types import (
    Failure,
    Handle,
    KeyBytes,
    NonNegative,
    ObjectKind,
    RequestId,
    Span,
)

Result = TypeVar("Result")

NO_REPLY = 0
"""The ``seq`` of a request whose sender does not wait for a reply; only a failure is told."""
MAX_ALSO_FOR = 256

_Handles = Annotated[list[Handle], Meta(max_length=MAX_ITEMS)]
_Keys = Annotated[list[KeyBytes], Meta(max_length=MAX_ITEMS)]
_Readings = Annotated[list[Reading], Meta(max_length=MAX_METRICS)]

SemaphoreName = Annotated[str, Meta(min_length=1, max_length=128)]
"""Such as ``"preprocess"``, or ``"tenant/NAME"``: what comes before the slash is its family."""


class Request(Struct, Generic[Result], array_like=True, forbid_unknown_fields=True):
    """A verb, which is answered by a `Result`."""

    waits: ClassVar[bool] = False
    """Whether it is answered when there is something to say; others are answered at once."""

    seq: int

    def withdrawal(self) -> Request[None] | None:
        """What to say when the answer is not waited for any more, so that nothing is reserved, no
        permit held, and no room waited for; ``None`` where there is nothing to take back.
        """
        return None


class Introduce(Request[None], tag="introduce"):
    """Whose request it is: what it queues for comes by that share. Without, it is the nameless."""

    request: RequestId
    share: Share


class Acquire(Request[list[Outcome]], tag="acquire"):
    """Pin what exists, see to it that what does not is made."""

    request: RequestId
    items: Annotated[list[Wanted], Meta(max_length=MAX_ITEMS)]


class Wait(Request[list[Outcome]], tag="wait"):
    """Answered when each key, acquired before, has been made or has failed.

    It is answered early when a maker has gone and one of the keys is this request's to make now:
    ``owner``, with ``in_flight`` for those that others still make.
    """

    waits: ClassVar[bool] = True

    request: RequestId
    keys: _Keys


class Create(Request[list[Handle]], tag="create"):
    """Blocks to write, all or none."""

    request: RequestId
    items: Annotated[list[CreateItem], Meta(max_length=MAX_ITEMS)]

    def withdrawal(self) -> Request[None]:
        return Unreserve(NO_REPLY, self.request, [], self.seq)


class Seal(Request[list[Handle]], tag="seal"):
    """End the writing, of all or none; the request keeps a pin on each; their handles, trimmed."""

    request: RequestId
    items: Annotated[list[SealItem], Meta(max_length=MAX_ITEMS)]


class Abort(Request[None], tag="abort"):
    """Give up writing. Who waits for the objects fails too, or without ``failure`` may try."""

    request: RequestId
    handles: _Handles
    failure: Failure | None = None


class Get(Request[None], tag="get"):
    """Pin sealed objects by handle, all or none: for the sender, and once for each of the clients
    in ``also_for``, under the same name of a request.
    """

    request: RequestId
    handles: _Handles
    also_for: Annotated[list[NonNegative], Meta(max_length=MAX_ALSO_FOR)] = []


class Release(Request[None], tag="release"):
    """Take back one pin of each; without ``handles``, drop all that the request holds."""

    request: RequestId
    handles: _Handles | None


class Reserve(Request[None], tag="reserve"):
    """Room for objects that the request will create or acquire, all or nothing.

    With ``queue`` it is answered when it has been reserved, by fair shares.
    """

    waits: ClassVar[bool] = True

    request: RequestId
    items: Annotated[list[ReserveItem], Meta(max_length=MAX_ITEMS)]
    queue: bool

    def withdrawal(self) -> Request[None]:
        return Unreserve(NO_REPLY, self.request, self.items, self.seq)


class Unreserve(Request[None], tag="unreserve"):
    """Take a `Reserve` back, named by its ``ticket`` (its ``seq``), whether it was answered or not.

    Of what was reserved, that much is returned of what has not been spent; nothing, if the call was
    refused. A `Create` that waits is taken back likewise. With ``NO_REPLY`` for a ticket it is
    returned whichever call it was given to.
    """

    request: RequestId
    items: Annotated[list[ReserveItem], Meta(max_length=MAX_ITEMS)]
    ticket: int


class AcquirePermit(Request[None], tag="acquire_permit"):
    """Hold ``number`` of the ``limit`` permits of a semaphore, of which all clients have the same.

    With ``queue`` it is answered when there are so many, by fair shares. They are the request's
    until it gives them back, or is released and its jobs have ended.
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
    """Give a permit back, or stop waiting for one; with a ``ticket``, of that call alone."""

    request: RequestId
    semaphore: SemaphoreName
    ticket: int = NO_REPLY


class Accept(Request[bool], tag="accept"):
    """Whether a request is there, whichever client's it is: an engine has read media of it.

    It gives back its permits of these semaphores, for which nothing more is to be done.
    """

    request: RequestId
    semaphores: Annotated[tuple[SemaphoreName, ...], Meta(max_length=8)] = ()


class Delete(Request[list[bool]], tag="delete"):
    """Take sealed objects away by key; whether each was there.

    Those who have one pinned keep it until they let go.
    """

    keys: _Keys


class Evict(Request[Evicted], tag="evict"):
    """Evict the least recently used of a kind, ``nbytes`` of them or all."""

    kind: ObjectKind
    nbytes: Nbytes | None


class List(Request[list[ObjectInfo]], tag="list"):
    """The largest objects."""

    kind: ObjectKind | None
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS)]


class Clients(Request[list[ClientInfo]], tag="clients"):
    """Who is connected, or was and still holds something."""


class Tenants(Request[list[TenantInfo]], tag="tenants"):
    """Whose requests wait for something, or have room reserved."""


class Take(Request[Order], tag="take"):
    """Wait for a job: to ``make`` an object, to ``fetch`` one, or to ``keep`` one elsewhere."""

    waits: ClassVar[bool] = True

    role: Role = "make"


class Finish(Request[None], tag="finish"):
    """The end of a job: how many bytes were written, or why it failed."""

    job: NonNegative
    used_nbytes: NonNegative
    failure: Failure | None
    spans: Annotated[list[Span], Meta(max_length=64)]


class Renew(Request[None], tag="renew"):
    """A fetch goes on, such as one that waits for what another node makes: its time begins anew.

    Nothing happens for a job that the client does not hold, and for one that is made: a process
    that decodes what clients send does not choose how long it may take.
    """

    job: NonNegative


class Stat(Request[Statistics], tag="stat"):
    """How the store is; it costs nothing, however many objects there are."""


class PushMetrics(Request[None], tag="push_metrics"):
    """All that a process has counted so far; ``source`` is a number that it keeps for its life."""

    source: NonNegative
    readings: _Readings


class ReadMetrics(Request[list[Reading]], tag="read_metrics"):
    """What all processes have counted, the dead included."""


VERBS: tuple[type[Request[Any]], ...] = (
    Introduce,
    Acquire,
    Wait,
    Create,
    Seal,
    Abort,
    Get,
    Release,
    Reserve,
    Unreserve,
    AcquirePermit,
    ReleasePermit,
    Accept,
    Delete,
    Evict,
    List,
    Clients,
    Tenants,
    Take,
    Finish,
    Renew,
    Stat,
    PushMetrics,
    ReadMetrics,
)
