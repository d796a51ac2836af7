"""The store's verbs, for code without an event loop: one interface, whatever is behind it.

What a request holds is named by the request's id, such as ``"chat-17"``: `Store.release` without
handles drops it all, and so does the end of the process. Every call has a deadline; a call that
missed it may still have been done, so release the request then.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal, Self, TypeVar, overload

from afferent.errors import AfferentError, DeadlineExceeded
from afferent.store.block import codec
from afferent.store.client.verbs import Call, Verbs
from afferent.store.client.views import VIEWS, DroppedPins, Eventfd, View, open_view
from afferent.store.protocol.items import CreateItem, SealItem
from afferent.store.protocol.replies import Reply, result_of
from afferent.store.protocol.requests import NO_REPLY, Release, Request
from afferent.types import Handle, ObjectKind

Result = TypeVar("Result")


class Store(Verbs):
    """A store of objects in shared memory. `LocalStore` and `DaemonStore` are the two there are.

    It has the `Verbs`, each of which returns when it is done. Any thread may call it.

    Examples:
        >>> import numpy as np
        >>> from afferent import Claim, Find, LocalStore, MiB, ObjectKind, SealItem, codec, keys
        >>> key = keys.frame(b"squares/v1", b"cat")
        >>> store = LocalStore(4 * MiB)
        >>> (outcome,) = store.acquire("request-1", [Claim(key, ObjectKind.FEATURES, 4096)])
        >>> outcome.state  # nobody has made it: it is ours to write
        'owner'
        >>> used = codec.write_into({"pixels": np.ones(3)}, store.block(outcome.handle))
        >>> (handle,) = store.seal("request-1", [SealItem(outcome.handle, used)])
        >>> store.release("request-1")
        >>> (found,) = store.acquire("request-2", [Find(key)])
        >>> found.state
        'hit'
        >>> store.release("request-2")
        >>> store.close()
    """

    def __init__(self, eventfd: Eventfd | None = None) -> None:
        """``eventfd`` is signalled when a view is gone."""
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
            key: Under which others find it, and it stays after its release; see `create`.
            max_header_nbytes: As for `codec.plan`: more of it for more than 30,000 tensors or so.
                A `view` of it has to allow as many.

        Raises:
            FormatError: It can't be stored (`afferent.codec`).
            NotPermitted: The store was opened without ``writable=True``.
            StoreFull: There is no room now.
            ArenaTooSmall: There never is.
        """
        self.check_writable()
        nbytes = codec.plan(tree, max_header_nbytes=max_header_nbytes).nbytes
        (handle,) = self.create(request, [CreateItem(kind, nbytes, key)])
        try:
            used = codec.write_into(tree, self.block(handle), max_header_nbytes=max_header_nbytes)
            (sealed,) = self.seal(request, [SealItem(handle, used)])
        except BaseException:  # whatever it was, others may wait for the key
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
        """Pin a sealed object, and see the tree in it: arrays over the arena, without a copy.

        The pin belongs to the arrays: it goes with the last of them, or earlier by `View.release`.
        To a type checker it is a tree of arrays by name; ``view: View[Any]`` takes any other.

        Args:
            tensors: ``"torch"`` for torch's, which are never read-only: **writing into one changes
                the object for all who read it**, or, without ``writable=True``, ends the process.
            max_header_nbytes: As for `put`.

        Raises:
            StaleHandle: The object is gone.
            StoreRestarted: It was lost with a former life of the store.
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

    # What is behind it

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. Arrays over the arena should be gone by now."""

    @abstractmethod
    def _exchange(self, request: Request[Any], timeout_s: float | None) -> Reply:
        """Send a request and wait for its reply."""

    def _call(self, call: Call[Result]) -> Result:
        """Of a call that is given up, nothing stays."""
        request = call.request
        try:
            reply = self._exchange(request, call.timeout_s)
        except (DeadlineExceeded, KeyboardInterrupt):
            if (withdrawal := request.withdrawal()) is not None:
                self._withdraw(withdrawal)
            raise
        return result_of(request, reply)

    def _withdraw(self, withdrawal: Request[Any]) -> None:
        """As `_tell`, and without a wait worth speaking of: the call's time is over."""
        self._tell(withdrawal)

    def _pin_dropper(self) -> Callable[[Handle], None]:
        return self._dropped_pins.note

    def _release_dropped_pins(self) -> None:
        for handles in self._dropped_pins.take().values():
            self._tell(Release(NO_REPLY, VIEWS, handles))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
