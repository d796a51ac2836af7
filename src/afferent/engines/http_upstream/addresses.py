"""Addresses of an upstream's servers, as settings and files have them. Pure."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from afferent.errors import ConfigError

_SHA256: Final = re.compile(r"sha256=([0-9a-fA-F]{64})\Z")


class Address(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address of one server.

    Attributes:
        url: ``unix:PATH``, ``http://HOST:PORT`` or ``https://HOST:PORT``.
        api_key: Sent instead of the client's key, if it is not empty.
        sha256: Digest of the only certificate that is trusted, in hexadecimal; empty: any that the
            certificate authorities have signed.
        ip: Address that the name in the URL has; empty: it is looked up for each connection.
    """

    url: str
    api_key: str = ""
    sha256: str = ""
    ip: str = ""

    @property
    def name(self) -> str:
        """Name of the server, different from those of all others."""
        return f"{self.url} ({self.ip})" if self.ip else self.url

    @property
    def host(self) -> str:
        """Name or address of its host; empty for a Unix socket."""
        return self.ip or urlsplit(self.url).hostname or ""


def parse(text: str, *, api_key: str = "") -> Address:
    """Read ``unix:PATH``, ``http://HOST:PORT`` or ``https://HOST:PORT#sha256=DIGEST``.

    Raises:
        ConfigError: It is none of them.
    """
    if text.startswith("unix:") and len(text) > len("unix:"):
        return Address(url=text, api_key=api_key)
    url, _, pin = text.partition("#")
    pinned = _SHA256.match(pin)
    try:
        parts = urlsplit(url)
        is_known = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_bare = parts.path in ("", "/") and not parts.query and parts.username is None
        is_right = is_known and is_bare and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or (pin and (pinned is None or parts.scheme != "https")):
        raise ConfigError(
            "must be unix:PATH, http://HOST:PORT, or https://HOST:PORT, perhaps with #sha256= and "
            "the digest of the server's certificate in 64 hexadecimal digits"
        )
    return Address(url=url.rstrip("/"), api_key=api_key, sha256=pinned[1].lower() if pinned else "")
