"""Checks of a request's origin and host: a page of another origin, or a name of another server.

A page of any origin, open in a browser on this machine, can send requests to a server here: by a
form (CSRF), or by a name of its own that resolves to this machine (DNS rebinding). Programs other
than browsers send neither `Origin` nor `Sec-Fetch-Site`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Container, Mapping
from urllib.parse import urlsplit


def is_reached_by(host: str, names: Container[str]) -> bool:
    """Return whether a `Host` field is an address, or one of these names.

    Args:
        names: Host names in lower case.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name in names or _is_address(name)


def is_from_own_page(headers: Mapping[str, str]) -> bool:
    """Return whether the request comes from a page of this origin, or from no browser.

    `Sec-Fetch-Site` decides if it is there, as no page can forge it: a proxy with TLS in front may
    send another `Host` than the browser. A page with a rebound name has its own origin, too: it is
    refused by `Host` (`is_reached_by`).
    """
    site = headers.get("sec-fetch-site", "none")
    if site != "none":
        return site == "same-origin"
    origin = headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc == headers.get("host")
    except ValueError:  # not a URL
        return False


def own_names(host: str) -> frozenset[str]:
    """Return the names of this machine, in lower case.

    Args:
        host: The address or name that the server listens on.
    """
    machine = socket.gethostname()
    names = {"localhost", host, machine, machine.partition(".")[0]}
    return frozenset(name.lower() for name in names)


def is_loopback(host: str) -> bool:
    """Return whether a server's listen address is reachable from this machine alone."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
