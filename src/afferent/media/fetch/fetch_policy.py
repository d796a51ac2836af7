"""Policy of URLs and addresses from which media may be fetched: decisions only, no I/O."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

from afferent.errors import ForbiddenUrl

_PORTS = {"http": 80, "https": 443}
_MAX_URL_LENGTH = 8192
_NAME = re.compile(r"[A-Za-z0-9._-]{1,253}")
_BRACKETED = re.compile(r"(?=.*:)[0-9A-Fa-f:.]{2,45}")

# Written out, because `is_global` depends on Python's version, and accepts some of these.
_FORBIDDEN_V4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "168.63.129.16/32",  # a cloud's own services, behind an address that looks public
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/3",
        ),
    )
)
_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
_FORBIDDEN_V6 = tuple(
    map(
        ipaddress.IPv6Network,
        (
            "2001::/23",  # protocols of their own, Teredo among them
            "2001:db8::/32",
            "2002::/16",  # 6to4
            "3fff::/20",
        ),
    )
)
_EMBEDDING_V6 = tuple(map(ipaddress.IPv6Network, ("::ffff:0:0/96", "64:ff9b::/96")))
"""Mapped addresses and NAT64: the last 32 bits are the IPv4 address that is really reached."""

_ISATAP = 0x5EFE


@dataclass(frozen=True, slots=True)
class Target:
    """URL that the policy accepts, in parts; its host is not yet resolved.

    ``path`` includes the query. These parts are dialled and sent: the URL is never parsed again, so
    no other parser can interpret it differently.
    """

    url: str
    scheme: str
    host: str
    port: int
    path: str

    @property
    def host_header(self) -> str:
        whole = authority(self.host, self.port)
        return whole.removesuffix(f":{_PORTS[self.scheme]}")


def authority(host: str, port: int) -> str:
    """Return ``HOST:PORT``, as URLs and settings write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_url(url: str, *, allow: Collection[str] = ()) -> Target:
    """Return the parts of an acceptable URL.

    Args:
        allow: ``HOST:PORT`` of the operator's own media hosts.

    Raises:
        ForbiddenUrl: Another scheme or port, credentials, or characters that parsers disagree on.
    """
    check_characters(url)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ForbiddenUrl("the URL is malformed") from error
    if parts.scheme not in _PORTS:
        raise ForbiddenUrl("media URLs are https:, http: or data:")
    if not host or "@" in parts.netloc:
        raise ForbiddenUrl("a media URL names a host, and no user")
    if not (_BRACKETED if "[" in parts.netloc else _NAME).fullmatch(host):
        raise ForbiddenUrl("the URL's host is malformed")
    if port is None:
        port = _PORTS[parts.scheme]
    if port not in _PORTS.values() and authority(host, port) not in allow:
        raise ForbiddenUrl(
            "media are fetched from ports 80 and 443 only; others are allowed by the server's "
            f"--fetch-allow {authority(host, port)}"
        )
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(url, parts.scheme, host, port, path)


def check_redirect(source: Target, location: str, *, allow: Collection[str] = ()) -> Target:
    """Return the target of a redirect, checked like any URL.

    Raises:
        ForbiddenUrl: Also when it leads from https to http.
    """
    check_characters(location)
    try:
        url = urljoin(source.url, location)
    except ValueError as error:
        raise ForbiddenUrl("the URL is malformed") from error
    target = check_url(url, allow=allow)
    if source.scheme == "https" and target.scheme != "https":
        raise ForbiddenUrl("a redirect leads from https to http")
    return target


def check_characters(url: str) -> None:
    """Check the length and the characters of a URL.

    Raises:
        ForbiddenUrl: The URL is too long, or has characters that parsers disagree on.
    """
    if len(url) > _MAX_URL_LENGTH or re.search(r"[\x00-\x20\x7f\\]", url):
        raise ForbiddenUrl("the URL is too long, or has characters that a URL may not have")
    if not url.isascii():
        raise ForbiddenUrl(
            "the URL is not ASCII: percent-encode its path, and write its host as xn--..."
        )


def address_of(host: str) -> str | None:
    """Return the address of a host that is an address in any spelling (``127.1``); ``None`` for a
    name.
    """
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except OSError:
        return None


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet, and to nothing else.

    An IPv4 address inside an IPv6 one counts where a network may translate it (mapped, NAT64).
    Obsolete tunnels (6to4, Teredo, ISATAP, "compatible") are never public.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if any(ip in network for network in _EMBEDDING_V6):
            ip = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
        else:
            return (
                ip in _UNICAST_V6
                and not any(ip in network for network in _FORBIDDEN_V6)
                and int(ip) >> 32 & 0xFDFF_FFFF != _ISATAP
                and ip.scope_id is None
            )
    return not any(ip in network for network in _FORBIDDEN_V4)
