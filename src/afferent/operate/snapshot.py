"""What a store says of itself at one time."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from msgspec.structs import replace

from afferent.operate.daemons import CLIENT_NAME, Running
from afferent.store import messages as m
from afferent.store.client import DaemonStore


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The figures, as they would be if nobody had asked: the asking client is left out."""

    running: Running
    statistics: m.Statistics
    clients: list[m.ClientInfo]
    taken_s: float

    @classmethod
    def take(cls, running: Running, store: DaemonStore) -> Snapshot:
        """Ask for it.

        Raises:
            StoreUnavailable: The daemon is gone.
        """
        statistics = store.stat()
        return cls(
            running,
            replace(statistics, num_clients=statistics.num_clients - 1),
            [client for client in store.list_clients() if not _is_self(client)],
            time.monotonic(),
        )


def _is_self(client: m.ClientInfo) -> bool:
    return client.pid == os.getpid() and client.name == CLIENT_NAME
