"""Views with a pin of their own; the last of a view's arrays drops it when it is collected."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from numpy.typing import NDArray

from afferent.errors import NotPermitted
from afferent.store.block import codec
from afferent.types import Handle

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Seen = TypeVar("Seen", default=codec.Arrays)
else:  # which knows no defaults yet
    from typing import TypeVar

    Seen = TypeVar("Seen")

VIEWS = "afferent/views"
"""Request that the pins of views belong to; each process has its own."""


class Eventfd:
    """Descriptor that becomes readable when it is signalled; works in any thread, under any lock.

    It is closed with its last user: a view may outlive its store.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self.fd).atexit = False

    def signal(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return


class DroppedPins:
    """Handles of collected views, until they are reported to the store.

    The garbage collector runs in any thread, even in one with the store's lock. So it only adds an
    entry, and a thread that may wait for the lock takes it.
    """

    def __init__(self, eventfd: Eventfd | None = None) -> None:
        """Create it; ``eventfd`` is signalled for each entry."""
        self._handles: deque[Handle] = deque()
        self._eventfd = eventfd

    def note(self, handle: Handle) -> None:
        self._handles.append(handle)
        if self._eventfd is not None:
            self._eventfd.signal()

    def take(self) -> dict[int, list[Handle]]:
        """Take all entries, by segment: the store refuses those of an earlier epoch, as a batch."""
        taken: dict[int, list[Handle]] = {}
        while True:
            try:  # other threads may take at the same time
                handle = self._handles.popleft()
            except IndexError:
                return taken
            taken.setdefault(handle.segment, []).append(handle)


class RequestViews:
    """Arrays over objects that a request has pinned, as an `ItemCache` returns them.

    They need no pin of their own while the request has its pins. When it is released, each array
    that is still alive gets one, so that its memory is never reused under it.
    """

    def __init__(self) -> None:
        self._opened: dict[str, _Opened] = {}

    def open(self, request: str, block: memoryview, handle: Handle) -> NDArray[np.uint8]:
        """Return the bytes of a block that the request has pinned, read-only."""
        root = np.frombuffer(block.toreadonly(), np.uint8)
        if (opened := self._opened.get(request)) is None:
            opened = self._opened.setdefault(request, _Opened())
        opened.add(handle, root)
        return root

    def take(self, request: str, handles: Sequence[Handle] | None) -> list[_Root]:
        """Return the live arrays of a request, or of some of its objects, once."""
        opened = self._opened.pop(request, None)
        if opened is None:
            return []
        alive = opened.alive()
        if handles is None:
            return alive
        for handle, root in alive:
            if handle not in handles:
                self._opened.setdefault(request, _Opened()).add(handle, root)
        return [(handle, root) for handle, root in alive if handle in handles]


_Root = tuple[Handle, NDArray[np.uint8]]
_MANY_ROOTS = 1024


class _Opened:
    """Arrays of one request; collected ones are removed now and then."""

    __slots__ = ("_limit", "_roots")

    def __init__(self) -> None:
        self._roots: list[tuple[Handle, weakref.ref[NDArray[np.uint8]]]] = []
        self._limit = _MANY_ROOTS

    def add(self, handle: Handle, root: NDArray[np.uint8]) -> None:
        self._roots.append((handle, weakref.ref(root)))
        if len(self._roots) > self._limit:
            self._roots = [(each, root) for each, root in self._roots if root() is not None]
            self._limit = max(_MANY_ROOTS, 2 * len(self._roots))

    def alive(self) -> list[_Root]:
        found = ((handle, root()) for handle, root in self._roots)
        return [(handle, root) for handle, root in found if root is not None]


class View(Generic[Seen]):
    """Tree in a sealed object, without a copy; see `Store.view`.

    Its arrays are valid as long as they live, wherever they are passed: the last of them that is
    collected drops the pin. Used as a context manager, its value is the tree.
    """

    def __init__(self, tree: Seen, root: NDArray[np.uint8], settle: Callable[[], None]) -> None:
        self._tree: Any = tree
        self._root, self._settle = weakref.ref(root), settle
        self._is_released = False

    @property
    def tree(self) -> Seen:
        """The tree as `afferent.codec.view` returns it, read-only.

        Raises:
            NotPermitted: The view has been released.
        """
        if self._is_released:
            raise NotPermitted("the view has been released: take what is needed of it before")
        tree: Seen = self._tree
        return tree

    def release(self) -> bool:
        """Release the view now, not at its collection: the tree's containers are emptied.

        Returns:
            Whether the pin is gone. Arrays that were taken out of the tree keep it.
        """
        tree, self._tree, self._is_released = self._tree, None, True
        _empty(tree)
        del tree
        self._settle()
        return self._root() is None

    def __enter__(self) -> Seen:
        return self.tree

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<View {'released' if self._is_released else type(self._tree).__name__}>"


def open_view(
    block: memoryview,
    handle: Handle,
    pins: DroppedPins,
    settle: Callable[[], None],
    *,
    tensors: codec.Library,
    max_header_nbytes: int,
) -> View[Any]:
    """Return a view of a pinned block, which takes over the pin."""
    # All arrays of the tree reference this one, and nothing else does.
    root = np.frombuffer(block.toreadonly(), np.uint8)
    tree = codec.view(root.data, tensors=tensors, max_header_nbytes=max_header_nbytes)
    weakref.finalize(root, pins.note, handle).atexit = False
    return View(tree, root, settle)


def _empty(tree: Any) -> None:
    if isinstance(tree, dict):
        for child in tree.values():
            _empty(child)
        tree.clear()
    elif isinstance(tree, list):
        for child in tree:
            _empty(child)
        tree.clear()
