"""What follows from a store's stats, and the JSON that programs get. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from afferent.operate.snapshot import Snapshot
from afferent.store.protocol.results import ClientInfo, KindStatistics, ObjectInfo, Statistics


@dataclass(frozen=True, slots=True)
class Rates:
    """Events per second between two snapshots."""

    hits: float
    misses: float
    joined: float
    evictions: dict[str, float]

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot) -> Rates:
        """A new epoch has counted from 0."""
        elapsed_s = max(after.taken_s - before.taken_s, 1e-9)
        old, new = before.statistics, after.statistics
        same = old.segment == new.segment

        def rate(earlier: int, later: int) -> float:
            return (later - (earlier if same else 0)) / elapsed_s

        return cls(
            hits=rate(old.num_hits, new.num_hits),
            misses=rate(old.num_misses, new.num_misses),
            joined=rate(old.num_joined, new.num_joined),
            evictions={
                kind: rate(old.kinds[kind].num_evicted, stats.num_evicted)
                for kind, stats in new.kinds.items()
            },
        )

    @property
    def hit_rate(self) -> float | None:
        return ratio(self.hits, self.hits + self.misses + self.joined)


def ratio(part: float, whole: float) -> float | None:
    """``None`` for a part of nothing."""
    return part / whole if whole else None


def hit_rate(statistics: Statistics) -> float | None:
    """What part of all that was acquired was there already."""
    asked = statistics.num_hits + statistics.num_misses + statistics.num_joined
    return ratio(statistics.num_hits, asked)


def free_nbytes(kind: KindStatistics) -> int:
    return kind.capacity_nbytes - kind.used_nbytes


def evictable_nbytes(kind: KindStatistics) -> int:
    """What is stored but held by nobody: room that can be had."""
    return kind.used_nbytes - kind.held_nbytes


def fragmentation(kind: KindStatistics) -> float | None:
    """What part of the free bytes is not in the largest extent; ``None`` when none is free."""
    free = free_nbytes(kind)
    return 1 - kind.largest_free_nbytes / free if free else None


def stat_document(snapshot: Snapshot) -> dict[str, Any]:
    """The stats under the names they have in `messages.Statistics`, and what follows."""
    running, statistics = snapshot.running, snapshot.statistics
    document: dict[str, Any] = {
        "address": running.address,
        "daemon_pid": running.daemon_pid,
        "owner_pid": running.owner_pid,
        **msgspec.to_builtins(statistics),
        "hit_rate": hit_rate(statistics),
        "clients": msgspec.to_builtins(snapshot.clients),
    }
    for name, kind in statistics.kinds.items():
        document["kinds"][name.value] |= {
            "free_nbytes": free_nbytes(kind),
            "evictable_nbytes": evictable_nbytes(kind),
            "fragmentation": fragmentation(kind),
        }
    return document


def object_document(item: ObjectInfo, clients: Mapping[int, ClientInfo]) -> dict[str, Any]:
    """One object; clients with their names and pids, which `None` replaces once they are gone."""

    def who(number: int) -> dict[str, Any]:
        client = clients.get(number)
        return {
            "client": number,
            "name": client.name if client else None,
            "pid": client.pid if client else None,
        }

    return {
        "key": item.key.hex() if item.key is not None else None,
        "kind": item.kind.value,
        "state": item.state,
        "nbytes": item.handle.nbytes,
        "segment": item.handle.segment,
        "offset": item.handle.offset,
        "generation": item.handle.generation,
        "writer": who(item.writer) if item.writer is not None else None,
        "pins": [who(number) for number in item.pins],
    }
