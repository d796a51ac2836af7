"""Connections to media hosts: resolved once, every answer checked, and then that one dialled."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpcore

from afferent.errors import FetchFailed, ForbiddenUrl
from afferent.ingest.fetch_policy import authority, is_public

_NUM_LOOKUPS = 16
_MAX_DIALLED = 4
_MAX_HEADER_NBYTES = 128 << 10
_HEADER_STEP_NBYTES = 4 << 10

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a host, the one to try first at the front."""


class Resolver:
    """Looks names up with the system's resolver.

    In threads of its own: a name server that never answers must not hold up anybody else's work.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_LOOKUPS, thread_name_prefix="resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        """Raises: FetchFailed: There is no such name."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, _look_up, host, port)
        except (OSError, UnicodeError) as error:  # the latter for labels that no name may have
            raise FetchFailed("the media host's name was not found") from error
        return list(dict.fromkeys(found))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _look_up(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class BoundedStream(httpcore.AsyncNetworkStream):
    """Reads the header of each answer in small steps, and not without end.

    All that one step brings is parsed in one go, and a host may send thousands of interim answers.
    """

    def __init__(self, inner: httpcore.AsyncNetworkStream) -> None:
        self._inner = inner
        self._header_nbytes: int | None = 0  # none once the header is complete

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
        self._header_nbytes = 0  # of the answer to this
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
    """Dials only addresses that the policy allows; TLS and Host still see the host's name.

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
            addresses = await self._resolve(host, port)
            if authority(host, port) not in self._allow and not all(map(is_public, addresses)):
                raise ForbiddenUrl("the media host's address is not a public one")
            for address in addresses[:_MAX_DIALLED]:
                try:
                    stream = await self._inner.connect_tcp(
                        address, port, timeout, local_address, socket_options
                    )
                except httpcore.ConnectError:
                    continue
                return BoundedStream(stream)
        raise FetchFailed("the media host could not be reached")

    async def connect_unix_socket(self, *args: Any, **kwargs: Any) -> httpcore.AsyncNetworkStream:
        raise ForbiddenUrl("media are not fetched from unix sockets")

    async def sleep(self, seconds: float) -> None:
        await self._inner.sleep(seconds)
