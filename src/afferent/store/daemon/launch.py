"""Settings to start a store daemon, without importing it."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from afferent.types import ObjectKind

DAEMON: Final = "afferent.store.daemon.main"


class DaemonSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of one daemon, for one epoch.

    - ``recovery_timeout_s``: clients of the previous epoch that still use it after this time are
      killed; ``None`` waits for them.
    - ``fetch_timeout_s``: a fetcher that takes longer for a job is killed, and the job is made
      here.
    """

    arena_fd: int
    listener_fd: int
    client_table_fd: int
    segment: int
    job_timeout_s: float
    fetch_timeout_s: float = 60.0
    recovery_timeout_s: float | None = None
    shares: dict[ObjectKind, float]
