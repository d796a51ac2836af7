"""Settings of the page's process, for the supervisor; imports no HTTP server."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

PAGE: Final = "afferent.operations.live_page.main"


class PageSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the page's process; ``listener_fd`` is set for each start."""

    listener_fd: int = -1
    sockets_folder: str
    """Folder of the server's sockets."""
    host: str
    """Host name of the page, in addition to addresses."""
    key: str
    """Key that the page requires; empty: none."""
    api_url: str
    """Base URL for questions."""
    api_key: str
    """API key for questions; empty: none is sent."""
    can_ask: bool
    timeout_s: float
    """Timeout of a whole answer."""
