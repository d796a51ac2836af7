"""What starts a frontend needs to know of it, without importing an HTTP server."""

from __future__ import annotations

import signal
from typing import Final

import msgspec
from msgspec import Struct

from afferent.config import ServeConfig
from afferent.preprocess.registry import AnyFamily
from afferent.types import MiB

FRONTEND: Final = "afferent.serve.frontend"

LEAVE_SIGNAL: Final = signal.SIGUSR1
"""Told to a frontend whose successor is there: whoever is connected is served once more."""

ENV = {
    "MALLOC_MMAP_THRESHOLD_": str(1 * MiB),
    "MALLOC_TRIM_THRESHOLD_": str(8 * MiB),
}
"""A frontend keeps the memory of the last piece of a body for the next: fresh pages for each cost a
tenth of the time that a request takes.
"""


class FrontendSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """``listener_fd`` is set for each start."""

    listener_fd: int = -1
    store_address: str
    link: msgspec.Raw
    """To the engine that ``config`` names."""
    model_folder: str
    model_name: str
    family: AnyFamily | None
    """``None``: no features are made for the model."""
    config: ServeConfig
    sockets_folder: str = ""
    """Where it tells of its requests; empty: nowhere."""
