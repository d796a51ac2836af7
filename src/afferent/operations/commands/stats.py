"""Values derived from a store's statistics, and their JSON for programs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from afferent.operations.commands.daemons import Snapshot
from afferent.store.protocol.results import ClientInfo, KindStatistics, ObjectInfo, Statistics


def hit_rate(statistics: Statistics) -> float | None:
    """Return the part of all acquired objects that were hits; ``None`` if none was acquired."""
    asked = statistics.num_hits + statistics.num_misses + statistics.num_joined
    return statistics.num_hits / asked if asked else None


def free_nbytes(kind: KindStatistics) -> int:
    return kind.capacity_nbytes - kind.used_nbytes


def evictable_nbytes(kind: KindStatistics) -> int:
    """Return the bytes of unpinned objects, which can be evicted."""
    return kind.used_nbytes - kind.held_nbytes


def fragmentation(kind: KindStatistics) -> float | None:
    """Return the part of the free bytes outside the largest extent; ``None`` if none is free."""
    free = free_nbytes(kind)
    return 1 - kind.largest_free_nbytes / free if free else None


def stat_document(snapshot: Snapshot) -> dict[str, Any]:
    """Return the fields of `messages.Statistics`, with the derived values."""
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
    """Return one object; its clients have a name and a pid, or `None` if they are gone."""

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
