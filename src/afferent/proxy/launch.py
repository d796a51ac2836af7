"""Settings to start a frontend, without importing an HTTP server."""

from __future__ import annotations

import signal
from typing import Final

import msgspec
from msgspec import Struct

from afferent.config import ServeConfig
from afferent.media.families.registry import AnyFamily
from afferent.types import MiB

FRONTEND: Final = "afferent.builtin.frontend"
UPSTREAM_FRONTEND: Final = "afferent.proxy.frontend"
"""The same in front of an upstream."""

LEAVE_SIGNAL: Final = signal.SIGUSR1
"""Sent to a frontend with a successor: each connected client gets one more answer."""

ENV = {
    "MALLOC_MMAP_THRESHOLD_": str(1 * MiB),
    "MALLOC_TRIM_THRESHOLD_": str(8 * MiB),
}
"""Allocator settings: a frontend reuses the memory of a body's last piece for the next.

Fresh pages for each would cost a tenth of a request's time.
"""


class FrontendSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of one frontend; ``listener_fd`` is set for each start."""

    listener_fd: int = -1
    store_address: str
    link: msgspec.Raw
    """Connection data of the engine that ``config`` names."""
    model_folder: str
    model_name: str
    family: AnyFamily | None
    """``None`` if no features are made for the model."""
    config: ServeConfig
    sockets_folder: str = ""
    """Folder of the socket for `Reports`; empty for none."""
