"""Connections to media hosts: resolved once; every address is checked; a checked address is
dialled.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Any

import aiodns
import httpcore

from afferent.errors import AfferentError, FetchFailed, ForbiddenUrl, Unavailable
from afferent.media.fetch.fetch_policy import address_of, authority, is_public
from afferent.runtime.exhaustion import blamed
from afferent.runtime.logs import Seldom

log = logging.getLogger(__name__)

_TRY_S, _NUM_TRIES = 1.0, 3
_NOT_FOUND_S, _MAX_NOT_FOUND = 5.0, 4096
_NOT_FOUND = "the media host's name was not found, or leads to no public address"
"""One text for both, so that clients can't discover internal names."""
_OURS = frozenset(
    (aiodns.error.ARES_ECONNREFUSED, aiodns.error.ARES_ENOMEM, aiodns.error.ARES_EFILE)
)
"""Errors of this machine or its name servers; without descriptors, the first."""
_MAX_DIALLED = 4
_MAX_HEADER_NBYTES = 128 << 10
_HEADER_STEP_NBYTES = 4 << 10

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Lookup of a host's addresses, with the first one to try at the front."""


class Resolver:
    """Looks up names at the system's name servers, and in its hosts file.

    It uses c-ares, on the event loop: any number of unanswered lookups may run concurrently, and
    none blocks another. A missing name is not looked up again for `_NOT_FOUND_S`.
    """

    def __init__(
        self, nameservers: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create a resolver; ``nameservers`` replace the system's, with their ports."""
        self._nameservers, self._clock = list(nameservers), clock
        self._channel: aiodns.DNSResolver | None = None
        self._not_found: dict[str, float] = {}  # until when
        self._seldom = Seldom(log)

    async def __call__(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host.

        Raises:
            FetchFailed: There is no such name.
            Unavailable: No name server can be reached: there are no descriptors, say.
        """
        if self._not_found.get(host, 0.0) > self._clock():
            raise FetchFailed(_NOT_FOUND)
        if self._channel is None:  # it belongs to the event loop
            self._channel = aiodns.DNSResolver(
                self._nameservers or None, timeout=_TRY_S, tries=_NUM_TRIES
            )
        try:
            found = await self._channel.getaddrinfo(host, port=port, type=socket.SOCK_STREAM)
        except (aiodns.error.DNSError, UnicodeError) as error:  # the latter of no name's characters
            if isinstance(error, aiodns.error.DNSError) and error.args[0] in _OURS:
                self._seldom.warning("no name server can be asked", reason=error.args[1])
                raise Unavailable("the server can't look up names now; try again") from error
            self._note(host)
            raise FetchFailed(_NOT_FOUND) from error
        return list(dict.fromkeys(node.addr[0].decode("ascii") for node in found.nodes))

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    def _note(self, host: str) -> None:
        now_s = self._clock()
        if len(self._not_found) >= _MAX_NOT_FOUND:
            self._not_found = {name: s for name, s in self._not_found.items() if s > now_s}
        if len(self._not_found) < _MAX_NOT_FOUND:
            self._not_found[host] = now_s + _NOT_FOUND_S


class BoundedStream(httpcore.AsyncNetworkStream):
    """Reads the header of each answer in small steps, up to a limit.

    All bytes of one step are parsed in one go, and a host may send thousands of interim answers.
    """

    def __init__(self, inner: httpcore.AsyncNetworkStream) -> None:
        self._inner = inner
        self._header_nbytes: int | None = 0  # `None` once the header is complete

    def end_header(self) -> None:
        self._header_nbytes = None

    async def read(
        self,
        max_bytes: int,
        timeout: float | None = None,  # noqa: ASYNC109  (httpcore's signature)
    ) -> bytes:
        if self._header_nbytes is None:
            return await self._inner.read(max_bytes, timeout)
        data = await self._inner.read(min(max_bytes, _HEADER_STEP_NBYTES), timeout)
        self._header_nbytes += len(data)
        if self._header_nbytes > _MAX_HEADER_NBYTES:
            raise FetchFailed("the media host's header is too long")
        return data

    async def write(
        self,
        buffer: bytes,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> None:
        self._header_nbytes = 0  # the header of the next answer begins
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> BoundedStream:
        return BoundedStream(await self._inner.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Dials only addresses that the policy allows; TLS and Host still use the host's name.

    Args:
        allow: ``HOST:PORT`` that may have any address.
    """

    def __init__(self, resolve: Resolve, *, allow: Collection[str]) -> None:
        self._inner = httpcore.AnyIOBackend()
        self._resolve, self._allow = resolve, allow

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  (httpcore's signature)
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        async with asyncio.timeout(timeout):  # for the look-up and all attempts together
            literal = address_of(host)
            addresses = await self._resolve(host, port) if literal is None else [literal]
            if authority(host, port) not in self._allow and not all(map(is_public, addresses)):
                if literal is not None:
                    raise ForbiddenUrl(
                        "the media host's address is not a public one; others are allowed by the "
                        "server's --fetch-allow HOST:PORT"
                    )
                raise FetchFailed(_NOT_FOUND)
            failed: AfferentError = FetchFailed("the media host could not be reached")
            for address in addresses[:_MAX_DIALLED]:
                try:
                    stream = await self._inner.connect_tcp(
                        address, port, timeout, local_address, socket_options
                    )
                except httpcore.ConnectError as error:
                    failed = blamed(error, failed)
                    continue
                return BoundedStream(stream)
        raise failed

    async def connect_unix_socket(self, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        raise ForbiddenUrl("media are not fetched from unix sockets")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)
