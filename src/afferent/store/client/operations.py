"""Operations of an item cache, each written once for code with and without an event loop.

An operation is a generator: it yields the result of a store's verb and receives the answer. With an
`ItemCache`, verbs return answers, which it sends back; an `AsyncItemCache` awaits them first.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    overload,
)

from numpy.typing import NDArray

from afferent import keys
from afferent.errors import FormatError
from afferent.store.block import codec
from afferent.store.client.media_reader import MediaReader, ReadMedia, Source, copy_into
from afferent.store.client.steps import ItemSteps, Origin, Result, Slot, Steps
from afferent.store.protocol.items import SealItem
from afferent.store.protocol.refusals import check_key, listed
from afferent.types import ContentKey, Handle, ObjectKind
from afferent.wording import shown

if TYPE_CHECKING:
    from afferent.store.client.async_item_cache import AsyncItemCache
    from afferent.store.client.item_cache import ItemCache

P = ParamSpec("P")
Result_co = TypeVar("Result_co", covariant=True)


class Operation(Protocol[P, Result_co]):
    """Type of a method that one cache calls, and the other awaits."""

    @overload
    def __get__(self, cache: ItemCache, owner: object = None) -> Callable[P, Result_co]: ...

    @overload
    def __get__(
        self, cache: AsyncItemCache, owner: object = None
    ) -> Callable[P, Coroutine[Any, Any, Result_co]]: ...


def operation(steps: Callable[Concatenate[Any, P], Steps[Result]]) -> Operation[P, Result]:
    """Make a method of both caches from its steps."""

    @functools.wraps(steps)
    def method(cache: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        return cache._run(steps(cache, *args, **kwargs))

    return cast("Operation[P, Result]", method)  # a function is bound like that


@dataclass(frozen=True, slots=True)
class Loaded:
    """Location of a file's bytes, pinned by the request.

    Attributes:
        key: Key under which other requests find them.
        digest: Digest of the bytes (`afferent.keys.digest`).
    """

    key: ContentKey
    digest: bytes
    handle: Handle


class Operations(ItemSteps):
    """Operations on the items of a store."""

    def __init__(
        self,
        store: Any,
        *,
        weights: bytes = b"",
        kind: ObjectKind = ObjectKind.FEATURES,
        num_workers: int = 0,
    ) -> None:
        """Create them over ``store``; arguments as for `afferent.ItemCache`."""
        super().__init__(store)
        self._weights, self._kind = weights, kind
        self._reader = MediaReader(num_workers)

    # Data

    @operation
    def allocate(self, request: str, sizes: Mapping[ContentKey, int]) -> Steps[list[Slot]]:
        """Allocate a slot for each item, in one round trip: all or none.

        If several requests allocate the same item, one of them gets its block; follow with
        `publish`.

        Args:
            sizes: For each item, the maximum size of its data in bytes.

        Raises:
            StoreFull: There is no space now.
            ArenaTooSmall: The arena is too small for it.
        """
        return (yield from self._allocate(request, sizes, self._kind))

    @operation
    def publish(self, request: str, used: Mapping[Handle, int]) -> Steps[list[Handle]]:
        """Seal written blocks of `allocate`: in one round trip, all or none.

        Args:
            used: Number of written bytes, for the handle of each slot.

        Returns:
            The handles to pass on, in the same order.
        """
        items = [SealItem(handle, nbytes) for handle, nbytes in used.items()]
        handles: list[Handle] = yield self._verbs.seal(request, items)
        return handles

    @operation
    def load(
        self, request: str, sources: Sequence[Source], key_of: Callable[[bytes], ContentKey]
    ) -> Steps[list[Loaded]]:
        """Load many files into the store, in two round trips.

        All files are read and digested; missing items are allocated in one round trip and sealed in
        another. Items that another request is loading are awaited. All items are pinned for the
        request. A failed call leaves only pins on others' items, until the request is released.

        Args:
            sources: Paths, and bytes of encoded files; duplicates are allowed.
            key_of: Computes the key of an item from the digest of its bytes
                (`afferent.keys.item_key`).

        Returns:
            The location of each, in the order of ``sources``.

        Raises:
            OSError: A file can't be read.
            FormatError: One of them is empty.
            NotPermitted: The store was opened without ``writable=True``.
            StoreFull: There is no space now.
            ArenaTooSmall: The arena is too small for it.
        """
        self._verbs.check_writable()
        reading = self._reader.reading(sources)
        read: list[ReadMedia] = yield self._do(reading.__enter__)
        try:
            return (yield from self._store_read(request, read, key_of))
        finally:
            reading.__exit__(None, None, None)

    @operation
    def set_data(
        self,
        request: str,
        data: Mapping[ContentKey, codec.Tree],
        *,
        max_header_nbytes: int = codec.MAX_HEADER_NBYTES,
    ) -> Steps[None]:
        """Store missing items; each is a tree of tensors (`afferent.codec`).

        Items that another request is writing are awaited. All items are pinned for the request.

        Args:
            max_header_nbytes: As for `Store.put`; `get_data` needs the same limit.

        Raises:
            NotPermitted: The store was opened without ``writable=True``.
        """
        yield from self._set(
            request, data, self._kind, origins={}, max_header_nbytes=max_header_nbytes
        )

    @operation
    def get_data(
        self,
        request: str,
        item_keys: Iterable[ContentKey],
        *,
        tensors: codec.Library = "numpy",
        max_header_nbytes: int = codec.MAX_HEADER_NBYTES,
    ) -> Steps[dict[ContentKey, Any]]:
        """Return the data of the stored items, pinned for the request.

        Args:
            tensors: As for `Store.view`, which describes the effect of writing into torch tensors.
            max_header_nbytes: As for `Store.put`.
        """
        wanted = listed("item_keys", item_keys)
        return (yield from self._get(request, wanted, tensors, max_header_nbytes))

    @operation
    def get_or_make(
        self,
        request: str,
        item_keys: Iterable[ContentKey],
        make: Callable[[ContentKey], codec.Tree | Awaitable[codec.Tree]],
        *,
        max_nbytes: int,
        tensors: codec.Library = "numpy",
        max_header_nbytes: int = codec.MAX_HEADER_NBYTES,
    ) -> Steps[dict[ContentKey, Any]]:
        """Return the data of all items, pinned for the request; missing items are made.

        Of all requests for an item, one makes it and the others wait. If ``make`` raises, the error
        propagates, and the next waiting request makes the item.

        Args:
            make: Called for the items that this request makes; each is visible to others as soon as
                it is made. An `AsyncItemCache` awaits the result, if it is awaitable.
            max_nbytes: Maximum size of one item's tree: its tensors, and about 100 bytes for
                each (``codec.plan(tree).nbytes`` is exact). Unused bytes are freed.
            tensors: As for `Store.view`, which describes the effect of writing into torch tensors.
            max_header_nbytes: As for `Store.put`.

        Raises:
            FormatError: A tree takes more than ``max_nbytes``, or ``make`` returned ``None``.
            NotPermitted: The store was opened without ``writable=True``.
            StoreFull: There is no space now.
        """

        def fill(key: ContentKey, block: memoryview) -> Steps[int]:
            tree: codec.Tree = yield make(key)
            if tree is None:
                raise FormatError("make returned None instead of a tree: is a return missing?")
            nbytes = codec.plan(tree, max_header_nbytes=max_header_nbytes).nbytes
            if nbytes > max_nbytes:
                raise FormatError(f"a tree takes {nbytes} bytes, and max_nbytes is {max_nbytes}")
            used: int = yield self._write(write, tree, block, nbytes=nbytes)
            return used

        write = functools.partial(codec.write_into, max_header_nbytes=max_header_nbytes)
        if not callable(make):
            raise FormatError(f"make must be a function of a key, not {shown(make)}")
        sizes = dict.fromkeys(listed("item_keys", item_keys), max_nbytes)
        yield from self._fill(request, sizes, self._kind, fill, origins={}, seal_each=True)
        return (yield from self._get(request, list(sizes), tensors, max_header_nbytes))

    # Embeddings

    @operation
    def set_embeddings(
        self,
        request: str,
        embeddings: Mapping[ContentKey, codec.Tree],
        *,
        computed_from: Mapping[ContentKey, Handle] | None = None,
        made_us: Mapping[ContentKey, int] | None = None,
    ) -> Steps[None]:
        """Store the encoder's output under the items' keys and the digest of its weights.

        Args:
            embeddings: For each item an array of shape ``(num_embeds, hidden)``, or a tree of such.
            computed_from: The features that each was computed from, pinned by this request. If a
                pin was lost meanwhile, nothing is stored.
            made_us: Encoder time for each, in microseconds, if known. A node uses it to decide
                which embeddings to copy to a tier, and which to fetch from it.

        Raises:
            StaleHandle: A pin was lost; the features may have changed during encoding.
        """
        renamed = {self._embeddings_key(key): array for key, array in embeddings.items()}
        sources, took = computed_from or {}, made_us or {}
        origins = {
            self._embeddings_key(key): Origin(
                [sources[key]] if key in sources else [], took.get(key, 0)
            )
            for key in embeddings
        }
        yield from self._set(request, renamed, ObjectKind.EMBEDDINGS, origins=origins)

    @operation
    def get_embeddings(
        self, request: str, item_keys: Iterable[ContentKey]
    ) -> Steps[dict[ContentKey, NDArray[Any]]]:
        """Return the existing embeddings of the items, pinned for the request."""
        renamed = {self._embeddings_key(key): key for key in listed("item_keys", item_keys)}
        found = yield from self._get(request, list(renamed), "numpy")
        return {renamed[key]: array for key, array in found.items()}

    @operation
    def release(self, request: str) -> Steps[None]:
        """Release all pins of the request, in one round trip.

        An array that is still alive keeps its memory pinned until it is collected. Meanwhile other
        processes can find the item, and its space is not reused.
        """
        yield self._verbs.release(request)

    # Differences between the caches

    @abstractmethod
    def _run(self, steps: Steps[Any]) -> Any:
        """Run all steps: return the operation's result, or an awaitable of it."""

    # Inner steps

    def _embeddings_key(self, item: ContentKey) -> ContentKey:
        check_key(item)  # `embeddings_key` would accept any bytes
        return keys.embeddings_key(item=item, weights=self._weights)

    def _store_read(
        self, request: str, read: list[ReadMedia], key_of: Callable[[bytes], ContentKey]
    ) -> Steps[list[Loaded]]:
        item_keys = [key_of(media.digest) for media in read]
        media = {key: each.data for key, each in zip(item_keys, read, strict=True)}

        def fill(key: ContentKey, block: memoryview) -> Steps[int]:
            data = media[key]
            used: int = yield self._write(copy_into, data, block, nbytes=len(data))
            return used

        sizes = {key: len(data) for key, data in media.items()}
        handles = yield from self._fill(
            request, sizes, self._kind, fill, origins={}, seal_each=False
        )
        return [
            Loaded(key, each.digest, handles[key])
            for key, each in zip(item_keys, read, strict=True)
        ]

    def _set(
        self,
        request: str,
        trees: Mapping[ContentKey, codec.Tree],
        kind: ObjectKind,
        *,
        origins: Mapping[ContentKey, Origin],
        max_header_nbytes: int = codec.MAX_HEADER_NBYTES,
    ) -> Steps[None]:
        most = max_header_nbytes
        sizes = {
            key: codec.plan(tree, max_header_nbytes=most).nbytes for key, tree in trees.items()
        }
        write = functools.partial(codec.write_into, max_header_nbytes=most)

        def fill(key: ContentKey, block: memoryview) -> Steps[int]:
            tree = trees[key]
            used: int = yield self._write(write, tree, block, nbytes=sizes[key])
            return used

        yield from self._fill(request, sizes, kind, fill, origins=origins, seal_each=False)
