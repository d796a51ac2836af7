"""Fetcher of media from URLs, restricted to hosts that a client could reach itself.

`fetch_policy` decides which hosts are allowed, `dial` enforces it for each connection, and `files`
reads the operator's folders. This module limits sizes, rates and concurrency. Nothing is read from
the environment (no proxies), and no credentials or cookies are sent.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import httpcore

from afferent.admission.shares import NAMELESS, Share
from afferent.config import Limits
from afferent.errors import FetchFailed, NoPermitLeft
from afferent.files.stored_file import ReadFile
from afferent.media.body.pace import Pace
from afferent.media.fetch.delivery import Budget, Delivery, MakeRoom, Sink
from afferent.media.fetch.dial import BoundedStream, CheckedBackend, Resolve, Resolver
from afferent.media.fetch.fetch_policy import Target, check_redirect, check_url
from afferent.media.fetch.files import FileRoots, Readable
from afferent.media.fetch.places import FairPlaces, PlacesByName, User
from afferent.media.fetch.url_memory import fresh_s as freshness
from afferent.runtime.exhaustion import blamed
from afferent.runtime.tasks import in_thread, until_done
from afferent.types import DOCUMENT, FileKind

T = TypeVar("T")

_REDIRECTS = (301, 302, 303, 307, 308)
_MAX_REDIRECTS = 3
_ACCEPT: dict[FileKind, str] = {DOCUMENT: "application/pdf, image/tiff"}
_MAX_CONCURRENT_FETCHES = 32
"""Limit of one request, which leaves connections for other requests; one host has a lower limit."""
_MAX_CONNECTIONS = 256
_GRACE_S = 3.0


@functools.cache
def _system_certificates() -> ssl.SSLContext:
    """Read the system's certificates, which takes 20 ms, once per process."""
    return ssl.create_default_context()


class Fetcher:
    """Fetches media; one per process.

    Args:
        resolve: Looks up names; by default the system's resolver.
        grace_s: Time for which a host may stay below the slowest rate, from its first answer on.
    """

    def __init__(
        self, limits: Limits, *, resolve: Resolve | None = None, grace_s: float = _GRACE_S
    ) -> None:
        self._limits, self._grace_s = limits, grace_s
        self._resolver = Resolver()
        self.files = FileRoots(limits.file_roots)
        self._places = PlacesByName(limits.fetch_max_per_host)
        self._connections = FairPlaces(_MAX_CONNECTIONS)
        self._num_sessions = itertools.count()
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=_system_certificates(),
            network_backend=CheckedBackend(
                resolve or self._resolver, allow=frozenset(limits.fetch_allow)
            ),
            max_connections=_MAX_CONNECTIONS,
            keepalive_expiry=5.0,
        )

    def session(self, *, max_nbytes: int, share: Share = NAMELESS) -> FetchSession:
        """Return a session for one request, whose fetches share a budget of bytes.

        Args:
            share: The tenant's share: waiting fetches for a host are scheduled fairly.
        """
        user = User(share, next(self._num_sessions))
        return FetchSession(self, Budget(max_nbytes), user)

    async def fetch_into(
        self, url: str, delivery: Delivery, *, modality: FileKind, user: User
    ) -> None:
        """Fetch a URL as `FetchSession.fetch_into` does."""
        try:
            await self._follow(url, delivery, modality, user)
        except (TimeoutError, httpcore.TimeoutException) as error:
            raise FetchFailed("the media host took too long") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            raise blamed(error, FetchFailed("the media host could not be reached")) from error

    async def _follow(self, url: str, delivery: Delivery, modality: FileKind, user: User) -> None:
        """Fetch, and follow redirects; the wait for a slot does not count as time."""
        allow = self._limits.fetch_allow
        target = check_url(url, allow=allow)
        left_s = self._limits.of(modality).fetch_timeout_s
        delivery.fresh_s = math.inf
        for _ in range(_MAX_REDIRECTS + 1):
            async with self._places.at(target.host, user), self._connection(user):
                started = time.monotonic()
                location = await _in_scope(self._get(target, delivery, modality), left_s)
                left_s -= time.monotonic() - started
            if location is None:
                return
            target = check_redirect(target, location, allow=allow)
        raise FetchFailed("the media host redirects too often")

    @asynccontextmanager
    async def _connection(self, user: User) -> AsyncIterator[None]:
        """Occupy one of the process's connections while the context lasts.

        Raises:
            NoPermitLeft: None is free in time; this is not the host's fault.
        """
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(self._limits.fetch_connect_timeout_s):
                    await stack.enter_async_context(self._connections.at(user))
            except TimeoutError as error:
                raise NoPermitLeft("too many media are being fetched; try again") from error
            yield

    async def _get(self, target: Target, delivery: Delivery, modality: FileKind) -> str | None:
        """Deliver the body, or return the location of a redirect."""
        url = httpcore.URL(
            scheme=target.scheme, host=target.host, port=target.port, target=target.path
        )
        headers = [
            ("Host", target.host_header),
            ("Accept", _ACCEPT.get(modality, f"{modality}/*")),
            ("Accept-Encoding", "identity"),
        ]
        timeouts = {
            "connect": self._limits.fetch_connect_timeout_s,
            "read": self._limits.fetch_idle_timeout_s,
            "write": self._limits.fetch_idle_timeout_s,
            "pool": self._limits.fetch_connect_timeout_s,
        }
        async with self._pool.stream(
            "GET", url, headers=headers, extensions={"timeout": timeouts}
        ) as response:
            self._note_freshness(response, delivery)
            locations = _values(response, b"location")
            if response.status in _REDIRECTS and locations:
                return locations[0].decode("latin-1")
            if response.status != 200:
                raise FetchFailed(f"the media host answered {response.status}")
            if any(v.lower() != b"identity" for v in _values(response, b"content-encoding")):
                raise FetchFailed("the media host sent an encoding that was not asked for")
            for length in _values(response, b"content-length"):
                await delivery.prepare(_parse_length(length))
            await self._deliver(response, delivery)
        return None

    def _note_freshness(self, response: httpcore.Response, delivery: Delivery) -> None:
        """Lower the freshness to the least one of all redirects and the answer."""
        fresh_s = freshness(
            _values(response, b"cache-control"),
            _values(response, b"age"),
            default_s=self._limits.fetch_fresh_s,
        )
        delivery.fresh_s = min(delivery.fresh_s, fresh_s)

    async def _deliver(self, response: httpcore.Response, delivery: Delivery) -> None:
        """Deliver the body.

        Raises:
            FetchFailed: The host delivers too slowly.
        """
        least = self._limits.fetch_min_nbytes_per_s
        stream = response.extensions["network_stream"]
        if isinstance(stream, BoundedStream):
            stream.end_header()
        started, pace = time.monotonic(), Pace()
        async for data in response.aiter_stream():  # chunks may be of one byte each
            await pace.rest()
            await delivery.prepare(delivery.nbytes + len(data))
            delivery.write(data)
            elapsed_s = time.monotonic() - started
            if elapsed_s > self._grace_s and delivery.nbytes < least * elapsed_s:
                raise FetchFailed(f"the media host delivers fewer than {least} bytes a second")

    async def close(self) -> None:
        await self._pool.aclose()
        await self._resolver.close()
        self.files.close()


async def _in_scope(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """Run ``work`` in a task that is cancelled by a scope of `anyio` alone.

    A connection of `httpcore` that gets `asyncio`'s own cancellation while it changes its state
    stays in the pool forever. A cancelled call waits for the end of ``work``.

    Raises:
        TimeoutError: It did not end in time.
    """
    scope = anyio.CancelScope()

    async def run() -> T:
        with scope, anyio.fail_after(timeout_s):
            return await work
        raise asyncio.CancelledError

    task = asyncio.create_task(run())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        scope.cancel()
        await until_done(task)
        raise


@dataclass(frozen=True, slots=True)
class WantedFile:
    """File that may have up to ``max_nbytes``.

    ``open`` opens one that has no ``file:`` URL.
    """

    url: str
    max_nbytes: int
    open: Callable[[], Readable] | None = None


class FetchSession:
    """Fetches of one request: a few at a time, within a budget of bytes."""

    def __init__(self, fetcher: Fetcher, budget: Budget, user: User) -> None:
        self._fetcher, self._budget, self._user = fetcher, budget, user
        self._places = asyncio.Semaphore(_MAX_CONCURRENT_FETCHES)

    async def fetch_into(
        self,
        url: str,
        sink: Sink,
        *,
        modality: FileKind,
        max_nbytes: int,
        make_room: MakeRoom | None = None,
    ) -> Delivery:
        """Pass the bytes of a URL to ``sink``; the delivery has their number, and how long they are
        fresh.

        The sink is called from the event loop; never after this has returned or raised. After an
        error, its bytes are invalid.

        Raises:
            Unavailable: The server is out of descriptors or memory; try again.
            NoPermitLeft: Too many media are being fetched; try again.
            ForbiddenUrl: The policy refuses the URL, or one that it redirects to.
            FetchFailed: The host did not deliver in time, or answered with an error.
            MediaTooLarge: There are more than ``max_nbytes``, or more than the request may have.
        """
        async with self._places:
            with Delivery(
                sink, max_nbytes=max_nbytes, budget=self._budget, make_room=make_room
            ) as delivery:
                await self._fetcher.fetch_into(url, delivery, modality=modality, user=self._user)
            return delivery

    async def read_files(
        self,
        wanted: Sequence[WantedFile],
        make_room: Callable[[Sequence[int]], Awaitable[Sequence[memoryview]]],
    ) -> list[ReadFile]:
        """Read and digest files, in a thread.

        Args:
            make_room: Returns blocks of the given lengths in bytes.

        Raises:
            Unavailable: The server is out of descriptors or memory; try again.
            ForbiddenUrl: One is not a plain file under a root, or reached through a link.
            FetchFailed: One can't be read.
            MediaTooLarge: As for `fetch_into`.
            AfferentError: ``open`` or ``read_into`` of one fails.
        """
        opened: list[Readable] = []
        try:
            await in_thread(_open_each, wanted, self._fetcher.files, opened)
            for file, known in zip(wanted, opened, strict=True):
                delivery = Delivery(_nowhere, max_nbytes=file.max_nbytes, budget=self._budget)
                delivery.announce(known.nbytes)
            blocks = await make_room([file.nbytes for file in opened])
            return await in_thread(_read_each, opened, blocks)
        finally:
            for known in opened:
                known.close()

    async def fetch(self, url: str, *, modality: FileKind, max_nbytes: int) -> bytes:
        """Return the bytes of a URL. Raises as `fetch_into` does."""
        data = bytearray()
        await self.fetch_into(url, data.extend, modality=modality, max_nbytes=max_nbytes)
        return bytes(data)


def _open_each(wanted: Sequence[WantedFile], roots: FileRoots, opened: list[Readable]) -> None:
    """Open files, and append them to ``opened``, also before an error."""
    for file in wanted:
        if file.open is not None:
            opened.append(file.open())
        else:
            roots.open_files([file.url], opened)


def _read_each(files: Sequence[Readable], blocks: Sequence[memoryview]) -> list[ReadFile]:
    return [file.read_into(block) for file, block in zip(files, blocks, strict=True)]


def _nowhere(_: bytes) -> None:
    """Drop bytes that are written elsewhere."""


def _values(response: httpcore.Response, name: bytes) -> list[bytes]:
    return [value.strip() for key, value in response.headers if key.lower() == name]


def _parse_length(text: bytes) -> int:
    if not text.isdigit() or len(text) > 20:
        raise FetchFailed("the media host announced no sensible length")
    return int(text)
