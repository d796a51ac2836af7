"""The store's verbs, for code without an event loop: one interface, whatever is behind it.

What a request holds is named by the request's id, such as ``"chat-17"``: `Store.release` without
handles drops it all, and so does the end of the process. Every call has a deadline; a call that
missed it may still have been done, so release the request then.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self, TypeVar

from afferent.errors import AfferentError, DeadlineExceeded
from afferent.store import codec
from afferent.store import messages as m
from afferent.store.views import VIEWS, Bell, DroppedPins, View, open_view
from afferent.types import Failure, Handle, ObjectKind, Span

Result = TypeVar("Result")

DEFAULT_TIMEOUT_S = 10.0


class Store(ABC):
    """A store of objects in shared memory. `LocalStore` and `DaemonStore` are the two there are.

    Any thread may call it.

    Raises:
        StoreUnavailable: From any verb: the store is gone or restarts. Nothing is held any more;
            try again.
        DeadlineExceeded: From any verb: no answer within ``timeout_s``.
    """

    def __init__(self, bell: Bell | None = None) -> None:
        """``bell`` is rung when a view is gone."""
        self._seq = itertools.count(1)
        self._dropped_pins = DroppedPins(bell)

    # Trees of tensors

    def put(
        self,
        request: str,
        tree: codec.Tree,
        *,
        kind: ObjectKind = ObjectKind.FEATURES,
        key: bytes | None = None,
    ) -> Handle:
        """Write a tree of tensors and seal it, in two round trips; the request has a pin on it.

        Args:
            key: Under which others find it, and it stays after its release; see `create`.

        Raises:
            FormatError: It can't be stored (`afferent.store.codec`).
            StoreFull: There is no room now.
            ArenaTooSmall: There never is.
        """
        nbytes = codec.plan(tree).nbytes
        (handle,) = self.create(request, [m.CreateItem(kind, nbytes, key)])
        try:
            used = codec.write_into(tree, self.block(handle))
            (sealed,) = self.seal(request, [m.SealItem(handle, used)])
        except BaseException:  # whatever it was, others may wait for the key
            with contextlib.suppress(AfferentError):
                self.abort(request, [handle])
            raise
        return sealed

    def view(self, handle: Handle, *, tensors: codec.Library = "numpy") -> View:
        """Pin a sealed object, and see the tree in it: arrays over the arena, without a copy.

        The pin belongs to the arrays: it goes with the last of them, or earlier by `View.release`.

        Args:
            tensors: ``"torch"`` for torch's; **writing into those may end the process**.

        Raises:
            StaleHandle: The object is gone.
            StoreRestarted: It was lost with a former life of the store.
            FormatError: It holds no tree.
        """
        self.get(VIEWS, [handle])
        try:
            block, settle = self.block(handle), self._release_dropped_pins
            return open_view(block, handle, self._dropped_pins, settle, tensors=tensors)
        except BaseException:
            with contextlib.suppress(AfferentError):
                self.release(VIEWS, [handle])
            raise

    # Objects

    def acquire(self, request: str, items: Sequence[m.AcquireItem]) -> list[m.Outcome]:
        """Pin what exists; see to it that what does not is made, once, whoever asks.

        Follow with `wait` for what is ``busy`` or ``miss``; write and `seal` what is ``yours``.
        """
        return self._call(m.Acquire(next(self._seq), request, list(items)), list[m.Outcome])

    def wait(
        self, request: str, keys: Sequence[bytes], *, timeout_s: float = 60.0
    ) -> list[m.Outcome]:
        """What became of keys that were ``busy`` or ``miss``, once all of them have an end.

        It returns early when the maker of one of them is gone and the request is to make it now:
        that one is ``yours``, and others may still be ``busy``.
        """
        message = m.Wait(next(self._seq), request, list(keys))
        return self._call(message, list[m.Outcome], timeout_s=timeout_s)

    def create(
        self,
        request: str,
        items: Sequence[m.CreateItem],
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[Handle]:
        """Blocks to write, all or none. What is written by nobody else is found by nobody else:
        without a key, only who has the handle can `get` the object.

        With a grant that covers them it waits until there are runs that are long enough.

        Raises:
            StoreFull: There is no room now.
            ArenaTooSmall: There never is.
        """
        message = m.Create(next(self._seq), request, list(items))
        return self._call_or_withdraw(message, list[Handle], timeout_s=timeout_s)

    def seal(self, request: str, items: Sequence[m.SealItem]) -> list[Handle]:
        """End the writing, of all or none; the request has a pin on each.

        Raises:
            NotPermitted: One is not the request's to seal.
            StaleHandle: What one was computed from is not pinned any more.
        """
        return self._call(m.Seal(next(self._seq), request, list(items)), list[Handle])

    def abort(
        self, request: str, handles: Sequence[Handle], *, failure: Failure | None = None
    ) -> None:
        """Give up the writing. Who waits for the objects fails with ``failure``, if there is one,
        and may make them otherwise.
        """
        self._call(m.Abort(next(self._seq), request, list(handles), failure), type(None))

    def get(self, request: str, handles: Sequence[Handle], *, also_for: Sequence[int] = ()) -> None:
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
        message = m.Get(next(self._seq), request, list(handles), list(also_for))
        self._call(message, type(None))

    def release(self, request: str, handles: Sequence[Handle] | None = None) -> None:
        """Take back one pin of each, or drop all that the request holds, grants included."""
        listed = list(handles) if handles is not None else None
        self._call(m.Release(next(self._seq), request, listed), type(None))

    def forget(self, request: str) -> None:
        """Drop all that the request holds, without waiting for the answer; never fails.

        A store that is gone holds nothing.
        """
        self._tell(m.Release(m.NO_REPLY, request, None))

    def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Take sealed objects away by key; whether each was there."""
        return self._call(m.Delete(next(self._seq), list(keys)), list[bool])

    def evict(self, kind: ObjectKind, nbytes: int | None = None) -> m.Evicted:
        """Evict the least recently used of a kind that nobody has pinned: some bytes, or all."""
        return self._call(m.Evict(next(self._seq), kind, nbytes), m.Evicted)

    # Room

    def reserve(
        self,
        request: str,
        items: Sequence[m.ReserveItem],
        *,
        queue: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Have room granted for objects that will be created or acquired: all or nothing.

        Without ``queue`` it is granted at once or not at all.

        Raises:
            StoreFull: Others hold the room, or too many wait for it.
            ArenaTooSmall: There never is that much.
            DeadlineExceeded: It was not granted in time, and is not waited for any more.
        """
        message = m.Reserve(next(self._seq), request, list(items), queue)
        self._call_or_withdraw(message, type(None), timeout_s=timeout_s)

    def unreserve(self, request: str, items: Sequence[m.ReserveItem]) -> None:
        """Return room that was granted, as far as it has not been used."""
        self._call(m.Unreserve(next(self._seq), request, list(items), 0), type(None))

    # Turns

    def enter(
        self,
        request: str,
        slot: str,
        *,
        limit: int,
        queue: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Be one of at most ``limit`` requests in a slot, over all processes, in order of arrival.

        The place is given back by `leave`, or when the request is released or its process ends;
        then it is free once the jobs that still run for this request alone have ended.

        Args:
            slot: A name, such as ``"preprocess"``.
            queue: Wait for a place; otherwise there is one now, or none.

        Raises:
            SlotTaken: There is no place, or too many wait for one.
            DeadlineExceeded: There was none in time, and it is not waited for any more.
            NotPermitted: The request is in the slot, or waits for it, already.
        """
        message = m.Enter(next(self._seq), request, slot, limit, queue)
        self._call_or_withdraw(message, type(None), timeout_s=timeout_s)

    def leave(self, request: str, slot: str) -> None:
        """Give the place back at once, or stop waiting for it; never fails."""
        self._tell(m.Leave(m.NO_REPLY, request, slot))

    # Jobs

    def take(self) -> m.Order:
        """Wait for a job, for ever if need be."""
        return self._call(m.Take(next(self._seq)), m.Order, timeout_s=None)

    def finish(
        self,
        order: m.Order,
        *,
        used_nbytes: int = 0,
        failure: Failure | None = None,
        spans: Sequence[Span] = (),
    ) -> None:
        """End a job: its object is sealed, or has failed for all who wait for it."""
        seq = next(self._seq)
        self._call(m.Finish(seq, order.job, used_nbytes, failure, list(spans)), type(None))

    # Questions

    def stat(self) -> m.Statistics:
        return self._call(m.Stat(next(self._seq)), m.Statistics)

    def list_objects(
        self, kind: ObjectKind | None = None, *, limit: int = 100
    ) -> list[m.ObjectInfo]:
        """The largest objects."""
        return self._call(m.List(next(self._seq), kind, limit), list[m.ObjectInfo])

    def list_clients(self) -> list[m.ClientInfo]:
        """Who holds what."""
        return self._call(m.Clients(next(self._seq)), list[m.ClientInfo])

    # What is behind it

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
    def close(self) -> None:
        """Let go of everything. Arrays over the arena should be gone by now."""

    @abstractmethod
    def _call(
        self,
        request: m.Request,
        result_type: type[Result],
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> Result:
        """Send a request and wait for its result."""

    @abstractmethod
    def _tell(self, request: m.Request) -> None:
        """Send a request whose reply nobody waits for; never fails."""

    def _call_or_withdraw(
        self, request: m.Request, result_type: type[Result], *, timeout_s: float
    ) -> Result:
        """Of a call that is given up, nothing stays."""
        try:
            return self._call(request, result_type, timeout_s=timeout_s)
        except (DeadlineExceeded, KeyboardInterrupt):
            if (withdrawal := m.withdrawal(request)) is not None:
                self._tell(withdrawal)
            raise

    def _release_dropped_pins(self) -> None:
        for handles in self._dropped_pins.take().values():
            self._tell(m.Release(m.NO_REPLY, VIEWS, handles))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
