"""One server of an upstream: its connections, and its health."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from afferent.engines.http_upstream.addresses import Address
from afferent.engines.http_upstream.known_names import KnownNames
from afferent.engines.http_upstream.placement import Replica
from afferent.errors import ConfigError

log = logging.getLogger(__name__)

_LOOK_TIMEOUT_S = 5.0
_MOST_UNANSWERED = 3
"""Health checks in a row without an answer, after which a server is down. A busy server may miss
one; a frozen server accepts requests and never answers them.
"""
_METRICS_TIMEOUT_S = 0.8
_CONNECT_TIMEOUT_S = 5.0
_WELL_TIMEOUT_S = 2.0
_KEEP_ALIVE_S = 3.0
"""Less than a usual server's (vLLM's: 5), which would close it while a request is in transit."""
_KEEP_ALIVE_PROBES = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""Seconds without traffic, seconds between probes, and number of unanswered probes."""
_READ_NBYTES = 1 << 18
_MOST_FIELD_NBYTES = 64 << 10
_MOST_FIELDS = 512
_FAILURES = 500


class _OneAddress(AbstractResolver):
    """Resolver of a server whose address is known, while its certificate has a name."""

    def __init__(self, ip: str) -> None:
        self._ip = ip

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        family = socket.AF_INET6 if ":" in self._ip else socket.AF_INET
        return [
            ResolveResult(
                hostname=host,
                host=self._ip,
                port=port,
                family=family,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
        ]

    async def close(self) -> None:
        pass


def trust_of(ca_file: str) -> ssl.SSLContext:
    """Return the certificate authorities that are trusted: those of a file, or of the system.

    Raises:
        ConfigError: The file has none.
    """
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--engine-ca {ca_file}: can't be read: {error}") from error


def _connector(address: Address, trust: ssl.SSLContext | None) -> aiohttp.BaseConnector:
    if address.url.startswith("unix:"):
        path = address.url.removeprefix("unix:")
        return aiohttp.UnixConnector(path=path, limit=0, keepalive_timeout=_KEEP_ALIVE_S)
    pin = aiohttp.Fingerprint(bytes.fromhex(address.sha256)) if address.sha256 else None
    return aiohttp.TCPConnector(
        limit=0,
        keepalive_timeout=_KEEP_ALIVE_S,
        ssl=pin or trust or True,
        resolver=_OneAddress(address.ip) if address.ip else None,
        socket_factory=_socket,
    )


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket whose idle connection ends a minute after its host has vanished."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE_PROBES.items():
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


class Server:
    """One server.

    Attributes:
        base: URL before a target.
        session: Its pool of connections.
        replica: Its state among the others.
        known: Names of the items that it has got.

    Invariants: `watch` sets ``replica.is_ready``; a failed connection or health check clears it.
    """

    def __init__(
        self,
        address: Address,
        replica: Replica,
        *,
        trust: ssl.SSLContext | None = None,
        needs_health: bool = True,
    ) -> None:
        """Create it, within an event loop.

        Args:
            trust: Certificate authorities of its certificate; ``None``: those of the system.
            needs_health: Whether it takes requests only if ``GET /health`` has the status 200; if
                not, any answer counts that is no failure of a server.
        """
        self.address, self.replica, self._needs_health = address, replica, needs_health
        self.known = KnownNames()
        is_unix = address.url.startswith("unix:")
        self.base = "http://upstream" if is_unix else address.url
        self.session = aiohttp.ClientSession(
            connector=_connector(address, trust),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            read_bufsize=_READ_NBYTES,
            # An upstream may repeat a field of the client in its answer.
            max_line_size=_MOST_FIELD_NBYTES,
            max_field_size=_MOST_FIELD_NBYTES,
            max_headers=_MOST_FIELDS,
        )
        self._num_unanswered, self._was_ready = 0, False
        self._waiting: set[asyncio.Timeout] = set()

    async def look(self, title: str) -> bool:
        """Check its health; return whether it takes requests.

        Args:
            title: Name of the upstream in messages.
        """
        is_ready, is_gone = self.replica.is_ready, False
        timeout = aiohttp.ClientTimeout(total=_LOOK_TIMEOUT_S)
        try:
            async with self._get("/health", timeout) as answer:
                is_ready = self._is_healthy(answer.status)
                is_gone = not is_ready
                self._num_unanswered = 0
        except TimeoutError:  # probably busy: a server that does not listen refuses at once
            self._num_unanswered += 1
            is_gone = self._num_unanswered >= _MOST_UNANSWERED
            is_ready = is_ready and not is_gone
        except (aiohttp.ClientError, OSError, RuntimeError):  # or out of threads, for a moment
            is_ready, is_gone = False, True
        if is_gone:  # also if a request has found it first
            self._give_up()
        if self._was_ready and not is_ready:
            log.warning("%s is gone", title, extra={"url": self.address.name})
        elif is_ready and not self._was_ready:
            log.info("%s answers", title, extra={"url": self.address.name})
        self._was_ready = is_ready
        return is_ready

    async def is_well(self) -> bool:
        """Whether its engine runs; a server that does not answer in time may only be busy."""
        try:
            async with self._get("/health", aiohttp.ClientTimeout(total=_WELL_TIMEOUT_S)) as answer:
                is_well = self._is_healthy(answer.status)
        except TimeoutError:
            return True
        except (aiohttp.ClientError, OSError):
            is_well = False
        self.replica.is_ready = self.replica.is_ready and is_well
        return is_well

    async def metrics(self) -> bytes | None:
        """Return its metrics page; ``None`` if it does not answer."""
        timeout = aiohttp.ClientTimeout(total=_METRICS_TIMEOUT_S)
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with self._get("/metrics", timeout) as answer:
                if answer.status == 200:
                    return await answer.read()
        return None

    @asynccontextmanager
    async def while_ready(self) -> AsyncIterator[None]:
        """Context that is cancelled when the server is found to be gone.

        Raises:
            TimeoutError: It is gone.
        """
        async with asyncio.timeout(None) as timeout:
            self._waiting.add(timeout)
            try:
                yield
            finally:
                self._waiting.discard(timeout)

    def _is_healthy(self, status: int) -> bool:
        return status == 200 if self._needs_health else status < _FAILURES

    def _give_up(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for timeout in self._waiting:
            if not timeout.expired():
                timeout.reschedule(now_s)

    def _get(
        self, target: str, timeout: aiohttp.ClientTimeout
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        key = self.address.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else None
        return self.session.get(self.base + target, timeout=timeout, headers=headers)
