"""Index of the objects: by key, by generation and by handle. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from afferent.errors import StaleHandle, StoreRestarted
from afferent.store.state.catalogue import Catalogue
from afferent.store.state.object import NewObject, ObjectState, StoredObject
from afferent.types import ClientId, ContentKey, Handle, Lease


class ObjectIndex:
    """All objects of one arena epoch.

    Invariants:
        - Generations are never reused within an epoch.
        - A key leads to at most one object, created or sealed.
    """

    def __init__(self, segment: int) -> None:
        self.segment = segment
        self._next_generation = 1
        self._by_generation: dict[int, StoredObject] = {}
        self._by_key: dict[ContentKey, StoredObject] = {}
        self.catalogue = Catalogue()

    def __len__(self) -> int:
        return len(self._by_generation)

    def __iter__(self) -> Iterator[StoredObject]:
        return iter(self._by_generation.values())

    def find(self, key: ContentKey) -> StoredObject | None:
        """Return the object under ``key``, created or sealed."""
        return self._by_key.get(key)

    def has_none_of(self, keys: Sequence[bytes]) -> bool:
        """Whether no object exists under any of these keys."""
        return self._by_key.keys().isdisjoint(keys)

    def resolve(self, handle: Handle) -> StoredObject:
        """Return the object behind a handle.

        Raises:
            StaleHandle: It is gone.
            StoreRestarted: It is from another epoch.
        """
        if handle.segment != self.segment:
            raise StoreRestarted(
                "the object is of another store, or was lost with a former life of this one"
            )
        found = self._by_generation.get(handle.generation)
        if found is None or handle.offset != found.handle.offset:
            raise StaleHandle(
                "the object behind this handle is gone: it was released, evicted or deleted"
            )
        return found

    def resolve_sealed(
        self, handles: Sequence[Handle], *, holder: ClientId | None = None
    ) -> list[StoredObject]:
        """Return the objects behind handles, all sealed.

        Args:
            handles: Of the objects.
            holder: Client that also finds deleted objects that it pins: its views of them live on.

        Raises:
            StaleHandle: One of them is gone, is not sealed, or was trimmed later.
        """
        found = [self.resolve(handle) for handle in handles]
        if not all(
            item.state is ObjectState.SEALED or any(client == holder for client, _ in item.pins)
            for item in found
        ):
            raise StaleHandle("the object behind a handle is not sealed yet")
        if any(h.nbytes > item.handle.nbytes for h, item in zip(handles, found, strict=True)):
            raise StaleHandle(
                "a handle is of the time before its object was sealed: take the one of seal"
            )
        return found

    # Changes

    def _add(
        self,
        writer: Lease,
        news: Sequence[NewObject],
        offsets: Iterable[int],
        sizes: Iterable[int],
    ) -> list[StoredObject]:
        """Add objects that ``writer`` writes, in these blocks."""
        segment, created = self.segment, []
        generation = self._next_generation
        for new, offset, nbytes in zip(news, offsets, sizes, strict=True):
            key = new.key
            handle = Handle(segment, offset, new.nbytes, generation)
            state, label = ObjectState.CREATED, new.label
            item = StoredObject(handle, nbytes, new.kind, state, key, writer, label=label)
            self._by_generation[generation] = item
            if key is not None:
                self._by_key[key] = item
            created.append(item)
            generation += 1
        self._next_generation = generation
        return created

    def _remember(self, item: StoredObject) -> None:
        """Undo `_forget`, while the key is still free."""
        self._by_generation[item.handle.generation] = item
        if item.key is not None:
            self._by_key[item.key] = item
            self.catalogue.store(item)

    def _forget(self, item: StoredObject) -> None:
        del self._by_generation[item.handle.generation]
        self._take_key(item)

    def _take_key(self, item: StoredObject) -> None:
        """Remove the object's key from the index."""
        if item.key is not None and self._by_key.get(item.key) is item:
            del self._by_key[item.key]
            self.catalogue.remove(item)
