"""What starts a store daemon needs to know of it, without importing the daemon."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from afferent.types import ObjectKind

DAEMON: Final = "afferent.store.daemon.main"


class DaemonSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """``recovery_timeout_s``: clients of the former epoch that keep it in use for longer are
    killed; without it they are waited for. Who fetches for a job for longer than
    ``fetch_timeout_s`` is killed, and the job done here.
    """

    arena_fd: int
    listener_fd: int
    client_table_fd: int
    segment: int
    job_timeout_s: float
    fetch_timeout_s: float = 60.0
    recovery_timeout_s: float | None = None
    shares: dict[ObjectKind, float]
