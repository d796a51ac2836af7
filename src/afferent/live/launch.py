"""What starts the page's process needs to know of it, without importing an HTTP server."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

PAGE: Final = "afferent.live.main"


class PageSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """``listener_fd`` is set for each start."""

    listener_fd: int = -1
    sockets_folder: str
    """Of the server."""
    host: str
    """Under which the page is reached, besides by addresses."""
    key: str
    """Which the page asks for; empty: nobody needs one."""
    api_url: str
    """Where questions go to."""
    api_key: str
    """What is sent with them; empty: nothing."""
    can_ask: bool
    timeout_s: float
    """For an answer in all."""
