"""Verbs of the store for code without an event loop: one interface to every implementation.

Pins belong to a request, named by its id, such as ``"chat-17"``. `Store.release` without handles
drops them all, and so does the end of the process. Every call has a deadline. A call that missed it
may still have been done: release the request then.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Literal, Self, TypeVar, overload

from afferent.errors import AfferentError, DeadlineExceeded
from afferent.store.block import codec
from afferent.store.client.verbs import Call, Verbs
from afferent.store.client.views import VIEWS, DroppedPins, Eventfd, View, open_view
from afferent.store.protocol.items import SealItem, in_messages
from afferent.store.protocol.replies import Reply, result_of
from afferent.store.protocol.requests import NO_REPLY, Release, Request
from afferent.types import CreateItem, Handle, ObjectKind

Result = TypeVar("Result")


class Store(Verbs):
    """Store of objects in shared memory; `LocalStore` and `DaemonStore` implement it.

    It has the `Verbs`; each returns when it is done. It is thread-safe.

    Examples:
        >>> import numpy as np
        >>> from afferent import Claim, Find, Hit, LocalStore, MiB, ObjectKind, SealItem
        >>> from afferent import codec, keys
        >>> key = keys.frame(b"squares/v1", b"cat")
        >>> store = LocalStore(4 * MiB)
        >>> (outcome,) = store.acquire("request-1", [Claim(key, ObjectKind.FEATURES, 4096)])
        >>> type(outcome).__name__  # it did not exist: this request writes it
        'Owner'
        >>> used = codec.write_into({"pixels": np.ones(3)}, store.block(outcome.handle))
        >>> (handle,) = store.seal("request-1", [SealItem(outcome.handle, used)])
        >>> store.release("request-1")
        >>> (found,) = store.acquire("request-2", [Find(key)])
        >>> found == Hit(handle)
        True
        >>> store.release("request-2")
        >>> store.close()
    """

    def __init__(self, eventfd: Eventfd | None = None) -> None:
        """Create it; ``eventfd`` is signalled when a view is collected."""
        super().__init__()
        self._dropped_pins = DroppedPins(eventfd)

    # Trees of tensors

    def put(
        self,
        request: str,
        tree: codec.Tree,
        *,
        kind: ObjectKind = ObjectKind.FEATURES,
        key: bytes | None = None,
        max_header_nbytes: int = codec.MAX_HEADER_NBYTES,
    ) -> Handle:
        """Write a tree of tensors and seal it, in two round trips; the request has a pin on it.

        Args:
            key: Key under which other requests find it; it also stays after its release; see
                `create`.
            max_header_nbytes: As for `codec.plan`: raise it for more than about 30,000 tensors.
                A `view` of it needs the same limit.

        Raises:
            FormatError: It can't be stored (`afferent.codec`).
            NotPermitted: The store was opened without ``writable=True``.
            StoreFull: There is no space now.
            ArenaTooSmall: The arena is too small for it.
        """
        self.check_writable()
        nbytes = codec.plan(tree, max_header_nbytes=max_header_nbytes).nbytes
        (handle,) = self.create(request, [CreateItem(kind, nbytes, key)])
        try:
            used = codec.write_into(tree, self.block(handle), max_header_nbytes=max_header_nbytes)
            (sealed,) = self.seal(request, [SealItem(handle, used)])
        except BaseException:  # on any error: other requests may wait for the key
            with contextlib.suppress(AfferentError):
                self.abort(request, [handle])
            raise
        return sealed

    @overload
    def view(
        self,
        handle: Handle,
        *,
        tensors: Literal["numpy"] = "numpy",
        max_header_nbytes: int = codec.MAX_HEADER_NBYTES,
    ) -> View[codec.Arrays]: ...
    @overload
    def view(
        self,
        handle: Handle,
        *,
        tensors: codec.Library,
        max_header_nbytes: int = codec.MAX_HEADER_NBYTES,
    ) -> View[Any]: ...
    def view(
        self,
        handle: Handle,
        *,
        tensors: codec.Library = "numpy",
        max_header_nbytes: int = codec.MAX_HEADER_NBYTES,
    ) -> View[Any]:
        """Pin a sealed object and view its tree: arrays over the arena, without a copy.

        The pin belongs to the arrays: it ends with the last of them, or earlier by `View.release`.
        A type checker sees a tree of arrays by name; ``view: View[Any]`` allows any other.

        Args:
            tensors: ``"torch"`` for torch tensors, which are never read-only: **writing into one
                changes the object for all readers**, or, without ``writable=True``, ends the
                process.
            max_header_nbytes: As for `put`.

        Raises:
            StaleHandle: The object is gone.
            StoreRestarted: It was lost with an earlier epoch of the store.
            FormatError: It holds no tree.
        """
        self.get(VIEWS, [handle])
        try:
            block, settle = self.block(handle), self._release_dropped_pins
            return open_view(
                *(block, handle, self._dropped_pins, settle),
                tensors=tensors,
                max_header_nbytes=max_header_nbytes,
            )
        except BaseException:
            with contextlib.suppress(AfferentError):
                self.release(VIEWS, [handle])
            raise

    # To be implemented

    @abstractmethod
    def close(self) -> None:
        """Release everything. Drop all arrays over the arena before."""

    @abstractmethod
    def _exchange(self, request: Request[Any], timeout_s: float | None) -> Reply:
        """Send a request and wait for its reply."""

    def _call(self, call: Call[Result]) -> Result:
        """Call a verb; a call that times out is withdrawn."""
        request = call.request
        try:
            reply = self._exchange(request, call.timeout_s)
        except (DeadlineExceeded, KeyboardInterrupt):
            if (withdrawal := request.withdrawal()) is not None:
                self._withdraw(withdrawal)
            raise
        return result_of(request, reply)

    def _withdraw(self, withdrawal: Request[Any]) -> None:
        """Send a withdrawal like `_tell`, with almost no wait: the call's time is over."""
        self._tell(withdrawal)

    def _pin_dropper(self) -> Callable[[Handle], None]:
        return self._dropped_pins.note

    def _release_dropped_pins(self) -> None:
        for release in self._dropped_releases():
            self._tell(release)

    def _dropped_releases(self) -> Iterator[Release]:
        """Yield the messages that release the pins of collected views."""
        for handles in self._dropped_pins.take().values():
            for some in in_messages(handles):
                yield Release(NO_REPLY, VIEWS, list(some))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
