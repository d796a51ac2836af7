"""Accounting of the embeddings that the workers store: plan, commit, release. Pure.

A request has one reference to a key while it has *uses* of it: one for each occurrence of the item
that was committed and not yet released. Entries without references stay cached until their space is
needed. They are evicted in the order of their last release, oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from afferent.errors import EncoderCacheFull, InternalError

_NOTHING: Mapping[bytes, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Plan:
    """Space for one use of one item; valid until the cache changes."""

    request_id: str
    key: bytes
    num_embeds: int
    nbytes: int
    needs_encode: bool
    """The workers don't have the embeddings yet."""
    takes_room: bool
    """The commit makes the entry unevictable: no request has a reference to it now."""
    victims: tuple[bytes, ...]
    """Entries to evict for this use, oldest first."""
    version: int


@dataclass(slots=True, eq=False)
class _Entry:
    num_embeds: int
    nbytes: int
    owners: set[str] = field(default_factory=set)


class EncoderCache:
    """Encoder cache with a capacity in rows and in bytes; a use is `plan`, `commit`, `release`.

    Examples:
        >>> from afferent.schedule import EncoderCache
        >>> cache = EncoderCache(capacity_embeds=100, capacity_nbytes=1 << 20)
        >>> plan = cache.plan("request-1", b"cat", num_embeds=80, nbytes=80 * 1024)
        >>> plan.needs_encode  # a plan changes nothing
        True
        >>> cache.commit(plan)
        >>> cache.release("request-1", b"cat")  # it may be evicted from now on
        >>> cache.plan("request-2", b"dog", num_embeds=80, nbytes=80 * 1024).victims
        (b'cat',)

    Invariants:
        - An entry is evictable exactly if it has no owners.
        - A request owns an entry exactly if it has uses of its key.
        - Each change of entries or uses ends the validity of all plans.
    """

    def __init__(self, *, capacity_embeds: int, capacity_nbytes: int) -> None:
        self.capacity_embeds, self.capacity_nbytes = capacity_embeds, capacity_nbytes
        self._free_embeds, self._free_nbytes = capacity_embeds, capacity_nbytes
        self._evictable_embeds = self._evictable_nbytes = 0
        self._entries: dict[bytes, _Entry] = {}
        self._evictable: OrderedDict[bytes, _Entry] = OrderedDict()
        # Uses by request and key; a request without uses has no entry here.
        self._uses: dict[str, dict[bytes, int]] = {}
        # Evicted since the last report: the workers still store these.
        self._unreported: dict[bytes, _Entry] = {}
        self._version = 0

    # Questions

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def used_embeds(self) -> int:
        return self.capacity_embeds - self._free_embeds

    @property
    def used_nbytes(self) -> int:
        return self.capacity_nbytes - self._free_nbytes

    def uses(self, request_id: str) -> Mapping[bytes, int]:
        """Return a request's uses by key. O(1), and a view: it follows later changes."""
        return self._uses.get(request_id, _NOTHING)

    def owners(self, key: bytes) -> frozenset[str]:
        """Return the requests that have a reference to an entry; none if it is not cached."""
        entry = self._entries.get(key)
        return frozenset(entry.owners) if entry is not None else frozenset()

    def check_fits(self, *, num_embeds: int, nbytes: int) -> None:
        """Check that an item of this size can fit at all.

        Raises:
            EncoderCacheFull: It exceeds the total capacity; the message names the limit.
        """
        if num_embeds > self.capacity_embeds:
            raise EncoderCacheFull(
                f"{num_embeds} embeddings exceed the encoder cache of {self.capacity_embeds} rows"
            )
        if nbytes > self.capacity_nbytes:
            raise EncoderCacheFull(
                f"{nbytes} bytes of embeddings exceed the encoder cache of "
                f"{self.capacity_nbytes} bytes"
            )

    def plan(self, request_id: str, key: bytes, *, num_embeds: int, nbytes: int) -> Plan | None:
        """Plan space for one use of an item; changes nothing.

        Args:
            request_id: The request that will own the use.
            key: Same key, same embeddings.
            num_embeds: Rows of the ``(num_embeds, hidden)`` output.
            nbytes: Bytes of the output. For a cached item, the cached sizes are used.

        Returns:
            A plan that names its victims, oldest first, or ``None`` while references block it.

        Raises:
            EncoderCacheFull: It exceeds the total capacity.
        """
        version = self._version
        cached = self._entries.get(key)
        if cached is not None:
            num_embeds, nbytes, is_free = cached.num_embeds, cached.nbytes, not cached.owners
            return Plan(request_id, key, num_embeds, nbytes, False, is_free, (), version)
        with_workers = self._unreported.get(key)
        if with_workers is not None:
            num_embeds, nbytes = with_workers.num_embeds, with_workers.nbytes
        self.check_fits(num_embeds=num_embeds, nbytes=nbytes)
        victims = self._find_victims(num_embeds, nbytes)
        if victims is None:
            return None
        needs_encode = with_workers is None
        return Plan(request_id, key, num_embeds, nbytes, needs_encode, True, victims, version)

    # Changes

    def commit(self, plan: Plan) -> None:
        """Apply a plan. The next `report_evicted` reports the keys that it evicts.

        Raises:
            InternalError: The cache has changed since `plan`.
        """
        if plan.version != self._version:
            raise InternalError("the encoder cache has changed since this plan")
        self._version += 1
        for victim in plan.victims:
            self._unreported[victim] = self._remove(victim)
        entry = self._entries.get(plan.key)
        if entry is None:
            # Evicted and requested again before the report to the workers: they still store it.
            self._unreported.pop(plan.key, None)
            entry = self._entries[plan.key] = _Entry(plan.num_embeds, plan.nbytes)
            self._free_embeds -= entry.num_embeds
            self._free_nbytes -= entry.nbytes
        elif not entry.owners:
            self._forbid_eviction(plan.key, entry)
        entry.owners.add(plan.request_id)
        uses = self._uses.setdefault(plan.request_id, {})
        uses[plan.key] = uses.get(plan.key, 0) + 1

    def release(self, request_id: str, key: bytes) -> None:
        """Release one use of a request; the last one drops its reference.

        Unknown uses are ignored: `release_all` or `discard` removed them earlier.
        """
        uses = self._uses.get(request_id)
        if uses is None or key not in uses:
            return
        self._version += 1
        uses[key] -= 1
        if uses[key] == 0:
            del uses[key]
            self._let_go(request_id, key)
        if not uses:
            del self._uses[request_id]

    def release_all(self, request_id: str) -> None:
        """Release all references of a request that has ended or begins again.

        O(its current references), not O(all that it ever had).
        """
        uses = self._uses.pop(request_id, None)
        if uses is None:
            return
        self._version += 1
        for key in uses:
            self._let_go(request_id, key)

    def discard(self, key: bytes) -> frozenset[str]:
        """Remove an entry that the workers could not produce, even if requests refer to it.

        Returns:
            The requests that had a reference. The key is not reported as evicted: the workers have
                nothing to evict.
        """
        self._unreported.pop(key, None)
        if key not in self._entries:
            return frozenset()
        self._version += 1
        owners = frozenset(self._remove(key).owners)
        for request_id in owners:
            uses = self._uses[request_id]
            del uses[key]
            if not uses:
                del self._uses[request_id]
        return owners

    def report_evicted(self) -> list[bytes]:
        """Return the keys that the workers have to drop: each eviction once."""
        evicted = list(self._unreported)
        if evicted:
            self._version += 1  # earlier plans assume that the workers store these
            self._unreported.clear()
        return evicted

    # Inner steps

    def _find_victims(self, num_embeds: int, nbytes: int) -> tuple[bytes, ...] | None:
        embeds, room = self._free_embeds, self._free_nbytes
        if num_embeds <= embeds and nbytes <= room:
            return ()
        # Checked before the walk, so that `commit` evicts each entry that the walk visits.
        if num_embeds > embeds + self._evictable_embeds or nbytes > room + self._evictable_nbytes:
            return None
        victims = []
        for key, entry in self._evictable.items():
            victims.append(key)
            embeds += entry.num_embeds
            room += entry.nbytes
            if num_embeds <= embeds and nbytes <= room:
                break
        return tuple(victims)

    def _let_go(self, request_id: str, key: bytes) -> None:
        entry = self._entries[key]
        entry.owners.discard(request_id)
        if not entry.owners:
            self._evictable[key] = entry
            self._evictable_embeds += entry.num_embeds
            self._evictable_nbytes += entry.nbytes

    def _forbid_eviction(self, key: bytes, entry: _Entry) -> None:
        del self._evictable[key]
        self._evictable_embeds -= entry.num_embeds
        self._evictable_nbytes -= entry.nbytes

    def _remove(self, key: bytes) -> _Entry:
        entry = self._entries.pop(key)
        if not entry.owners:
            self._forbid_eviction(key, entry)
        self._free_embeds += entry.num_embeds
        self._free_nbytes += entry.nbytes
        return entry
