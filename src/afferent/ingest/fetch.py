"""Fetching media from URLs, without reaching anything that a client could not reach itself.

The address is checked where it is dialled: a host is resolved once, all of its answers must be
public, and the connection goes to one of those answers. A redirect is a new URL and is checked
again. Nothing is read from the environment (no proxies), and no credentials are sent.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

import httpcore

from afferent.config import Limits
from afferent.errors import FetchFailed, ForbiddenUrl, MediaTooLarge
from afferent.types import Modality

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 3
_MAX_CONCURRENT_FETCHES = 4
_MAX_URL_LENGTH = 8192
# `is_global` lets these pass: translations that embed an IPv4 address, and a cloud's own services.
_FORBIDDEN_NETWORKS = tuple(
    ipaddress.ip_network(network)
    for network in (
        "64:ff9b::/96",
        "64:ff9b:1::/48",
        "2002::/16",
        "2001::/32",
        "::/96",
        "fec0::/10",
        "168.63.129.16/32",
        "100.64.0.0/10",
        "192.0.0.0/24",
    )
)


@dataclass(frozen=True, slots=True)
class Target:
    """A URL that the policy lets through, so far: its host is not yet resolved."""

    url: str
    scheme: str
    host: str
    port: int


def check_url(url: str, *, allow: Iterable[str] = ()) -> Target:
    """The parts of an acceptable URL.

    Raises:
        ForbiddenUrl: Another scheme or port, credentials, or characters that parsers disagree on.
    """
    if len(url) > _MAX_URL_LENGTH or re.search(r"[\x00-\x20\x7f\\]", url):
        raise ForbiddenUrl("the URL is too long, or has characters that a URL may not have")
    if not url.isascii():
        raise ForbiddenUrl(
            "the URL is not ASCII: percent-encode its path, and write its host as xn--..."
        )
    try:
        parts: SplitResult = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ForbiddenUrl("the URL is malformed") from error
    if parts.scheme not in _PORTS:
        raise ForbiddenUrl("media URLs are https:, http: or data:")
    if not host or parts.username is not None or parts.password is not None:
        raise ForbiddenUrl("a media URL names a host, and no user")
    if port is None:
        port = _PORTS[parts.scheme]
    if port not in _PORTS.values() and f"{host}:{port}" not in set(allow):
        raise ForbiddenUrl("media are fetched from ports 80 and 443 only")
    return Target(url, parts.scheme, host, port)


def is_public(address: str) -> bool:
    """Whether an address belongs to the public internet, and to nothing else."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if any(ip in network for network in _FORBIDDEN_NETWORKS if network.version == ip.version):
        return False
    return ip.is_global and not ip.is_multicast


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Dials only addresses that the policy allows; TLS and Host still see the host's name."""

    def __init__(self, allow: frozenset[str]) -> None:
        self._inner = httpcore.AnyIOBackend()
        self._allow = allow

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  (httpcore's signature)
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await _resolve(host, port)
        if f"{host}:{port}" not in self._allow and not all(map(is_public, addresses)):
            raise ForbiddenUrl("the media host's address is not a public one")
        return await self._inner.connect_tcp(
            addresses[0], port, timeout, local_address, socket_options
        )

    async def connect_unix_socket(self, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        raise ForbiddenUrl("media are not fetched from unix sockets")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)


async def _resolve(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the latter for labels that no name may have
        raise FetchFailed("the media host's name was not found") from error
    return [str(entry[4][0]) for entry in found]


class Fetcher:
    """Fetches media; one per process."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl.create_default_context(),
            network_backend=_CheckedBackend(frozenset(limits.fetch_allow)),
            max_connections=64,
            keepalive_expiry=5.0,
        )

    def session(self, *, max_nbytes: int) -> FetchSession:
        """The fetches of one request, which share a budget of bytes."""
        return FetchSession(self, max_nbytes=max_nbytes)

    async def fetch(self, url: str, *, modality: Modality, max_nbytes: int) -> bytes:
        """The bytes behind a URL.

        Raises:
            ForbiddenUrl: The policy refuses the URL, or one that it redirects to.
            FetchFailed: The host did not deliver in time, or answered with an error.
            MediaTooLarge: There are more than ``max_nbytes``.
        """
        try:
            async with asyncio.timeout(self._timeout_s(modality)):
                target = check_url(url, allow=self._limits.fetch_allow)
                return await self._follow(target, modality, max_nbytes)
        except (TimeoutError, httpcore.TimeoutException) as error:
            raise FetchFailed("the media host took too long") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError, ssl.SSLError) as error:
            raise FetchFailed("the media host could not be reached") from error

    def _timeout_s(self, modality: Modality) -> float:
        match modality:
            case Modality.IMAGE:
                return self._limits.fetch_total_timeout_s
            case Modality.AUDIO:
                return self._limits.fetch_audio_timeout_s
            case Modality.VIDEO:
                return self._limits.fetch_video_timeout_s

    async def _follow(self, target: Target, modality: Modality, max_nbytes: int) -> bytes:
        for _ in range(_MAX_REDIRECTS + 1):
            data, location = await self._get(target, modality, max_nbytes)
            if location is None:
                return data
            following = check_url(urljoin(target.url, location), allow=self._limits.fetch_allow)
            if target.scheme == "https" and following.scheme != "https":
                raise ForbiddenUrl("a redirect leads from https to http")
            target = following
        raise FetchFailed("the media host redirects too often")

    async def _get(
        self, target: Target, modality: Modality, max_nbytes: int
    ) -> tuple[bytes, str | None]:
        """The body, or where the answer redirects to."""
        limits = self._limits
        timeouts = {
            "connect": limits.fetch_connect_timeout_s,
            "read": limits.fetch_idle_timeout_s,
            "write": limits.fetch_idle_timeout_s,
            "pool": self._timeout_s(modality),
        }
        host = target.url.split("://", 1)[1].split("/", 1)[0].split("?", 1)[0].split("#", 1)[0]
        headers = {"Host": host, "Accept": f"{modality}/*", "Accept-Encoding": "identity"}
        async with self._pool.stream(
            "GET",
            target.url,
            headers=list(headers.items()),
            extensions={"timeout": timeouts},
        ) as response:
            answered = {k.lower(): v for k, v in response.headers}
            if response.status in _REDIRECTS and b"location" in answered:
                return b"", answered[b"location"].decode("latin-1")
            if response.status != 200:
                raise FetchFailed(f"the media host answered {response.status}")
            data = bytearray()
            async for chunk in response.aiter_stream():
                data += chunk
                if len(data) > max_nbytes:
                    raise MediaTooLarge(f"the media have more than {max_nbytes} bytes")
            return bytes(data), None

    async def close(self) -> None:
        await self._pool.aclose()


class FetchSession:
    """The fetches of one request: a few at a time, and so many bytes in all."""

    def __init__(self, fetcher: Fetcher, *, max_nbytes: int) -> None:
        self._fetcher = fetcher
        self._max_nbytes = max_nbytes
        self._used_nbytes = 0
        self._places = asyncio.Semaphore(_MAX_CONCURRENT_FETCHES)

    async def fetch(self, url: str, *, modality: Modality, max_nbytes: int) -> bytes:
        """As `Fetcher.fetch`.

        Raises:
            MediaTooLarge: Also when the request's fetches exceed their budget together.
        """
        async with self._places:
            room = self._max_nbytes - self._used_nbytes
            data = await self._fetcher.fetch(
                url, modality=modality, max_nbytes=min(max_nbytes, room)
            )
            self._used_nbytes += len(data)
            if self._used_nbytes > self._max_nbytes:
                raise MediaTooLarge(f"the media have more than {self._max_nbytes} bytes in all")
            return data
