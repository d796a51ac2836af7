"""Snapshot of a store's statistics."""

from __future__ import annotations

import os
from dataclasses import dataclass

from msgspec.structs import replace

from afferent.operations.commands.daemons import CLIENT_NAME, Running
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.protocol.results import ClientInfo, Statistics


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Statistics and clients of a store, without the client that requests them."""

    running: Running
    statistics: Statistics
    clients: list[ClientInfo]

    @classmethod
    def take(cls, running: Running, store: DaemonStore) -> Snapshot:
        """Request a snapshot.

        Raises:
            StoreUnavailable: The daemon is gone.
        """
        statistics = store.stat()
        return cls(
            running,
            replace(statistics, num_clients=statistics.num_clients - 1),
            [client for client in store.list_clients() if not _is_self(client)],
        )


def _is_self(client: ClientInfo) -> bool:
    return client.pid == os.getpid() and client.name == CLIENT_NAME
