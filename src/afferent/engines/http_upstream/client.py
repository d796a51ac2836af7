"""HTTP client of one or several servers of an upstream."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from afferent.engines.references import Reference, sign
from afferent.engines.upstream import NameOf, UpstreamAnswer, UpstreamRequest, UpstreamStats
from afferent.errors import EngineUnavailable, InvalidRequest
from afferent.types import Modality

log = logging.getLogger(__name__)

_SALT_TAG = b"afferent/salt-key/v1"
_LOOK_S = 1.0
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
_READ_NBYTES = 1 << 18
_MORE_LOADED = 4
"""Excess of running requests, over the least loaded server, up to which a request goes to the
server that has seen its item.
"""
_CONNECTIONS = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect"),
    }
)
"""Headers about one connection, or about a body that may have changed."""
_OF_ANSWERS = (_CONNECTIONS - {b"content-length"}) | {b"date", b"server"}
"""The same, and those that every HTTP server writes by itself."""
_LOCATIONS = frozenset({b"location", b"content-location"})
"""Headers with a URL, which may name a server that a client can't reach."""
_FAILED = 500
"""Status of an API server when its engine has ended, among other cases."""
_KEYS = frozenset({b"authorization", b"x-api-key"})
_OF_SOCKETS = b"sec-websocket-"
"""Prefix of further headers about one connection."""
_MAX_MESSAGE_NBYTES = 16 << 20
_SENDABLE_CODES = {None: 1000, 1005: 1000, 1006: 1013}
"""Close codes to forward instead of those that only report a missing code: normal end; try again
later.
"""


class ServerTraits:
    """Differences between any HTTP server and one of a certain kind, which overrides them."""

    takes_any_file = False
    """See `Upstream.takes_any_file`."""
    name_of: NameOf | None = None
    """See `Upstream.name_of`."""

    def takes(self, modality: Modality, file: bytes | memoryview | None) -> bool:
        """See `Upstream.takes`."""
        return True

    def stats_of(self, pages: Sequence[bytes]) -> UpstreamStats | None:
        """Return the statistics in the servers' metrics pages; ``None`` if there are none."""
        return None


@dataclass(eq=False, slots=True)
class _Server:
    """One server; its targets are appended to ``base``."""

    url: str
    base: str
    session: aiohttp.ClientSession
    is_ready: bool = False
    num_running: int = 0
    num_unanswered: int = 0

    @classmethod
    def at(cls, url: str) -> Self:
        if url.startswith("unix:"):
            connector: aiohttp.BaseConnector = aiohttp.UnixConnector(
                path=url.removeprefix("unix:"), limit=0, keepalive_timeout=_KEEP_ALIVE_S
            )
            base = "http://upstream"
        else:
            connector, base = (
                aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                url.rstrip("/"),
            )
        session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            read_bufsize=_READ_NBYTES,
        )
        return cls(url, base, session)


class HttpClient:
    """HTTP client of an upstream's servers; see `afferent.engines.upstream.Upstream`.


    Invariants:
        - A server's ``num_running`` is the number of requests and WebSockets that are open on it.
        - Only servers with ``is_ready`` get requests; `watch` sets it, and a failed connection or
          a failed health check clears it.
    """

    def __init__(
        self,
        servers: Sequence[_Server],
        *,
        title: str,
        api_key: str,
        secret: bytes,
        traits: ServerTraits,
    ) -> None:
        self._servers, self._title, self._secret = servers, title, secret
        self._traits = traits
        self._key_header = (b"authorization", f"Bearer {api_key}".encode()) if api_key else None

    @classmethod
    @asynccontextmanager
    async def over(
        cls,
        urls: Sequence[str],
        *,
        title: str,
        api_key: str,
        secret: bytes,
        traits: ServerTraits | None = None,
    ) -> AsyncIterator[Self]:
        """Yield a client of the servers at these addresses, which checks their health.

        Args:
            title: Their name in messages.
            api_key: Sent instead of the client's key, if it is not empty.
            secret: Signs the references.
            traits: Traits of such servers; by default, those of any HTTP server.
        """
        async with contextlib.AsyncExitStack() as stack:
            servers = [_Server.at(url) for url in urls]
            for server in servers:
                await stack.enter_async_context(server.session)
            client = cls(
                servers,
                title=title,
                api_key=api_key,
                secret=secret,
                traits=traits or ServerTraits(),
            )
            watching = asyncio.create_task(client.watch())
            try:
                yield client
            finally:
                watching.cancel()
                await asyncio.wait([watching])

    @property
    def is_ready(self) -> bool:
        return any(server.is_ready for server in self._servers)

    @property
    def takes_any_file(self) -> bool:
        """See `Upstream.takes_any_file`."""
        return self._traits.takes_any_file

    def takes(self, modality: Modality, file: bytes | memoryview | None) -> bool:
        """See `Upstream.takes`."""
        return self._traits.takes(modality, file)

    @property
    def name_of(self) -> NameOf | None:
        """See `Upstream.name_of`."""
        return self._traits.name_of

    @property
    def salt_key(self) -> bytes:
        """See `Upstream.salt_key`."""
        return hmac.new(self._secret, _SALT_TAG, hashlib.sha256).digest()

    def sign(self, reference: Reference) -> str:
        return sign(reference, self._secret)

    @asynccontextmanager
    async def forward(self, request: UpstreamRequest) -> AsyncIterator[UpstreamAnswer]:
        """See `Upstream.forward`."""
        with self._at_work(request.keys) as server:
            with self._reaching(server):
                answer = await server.session.request(
                    request.method,
                    URL(server.base + request.target, encoded=True),
                    headers=self._headers(request),
                    data=request.body or None,
                    allow_redirects=False,
                )
            async with answer:
                if answer.status == _FAILED and not await _is_well(server):
                    raise EngineUnavailable(f"{self._title}'s engine has ended; try again")
                yield UpstreamAnswer(
                    status=answer.status,
                    headers=[
                        (name, _relative(value, server.base))
                        if name.lower() in _LOCATIONS
                        else (name, value)
                        for name, value in answer.raw_headers
                        if name.lower() not in _OF_ANSWERS
                    ],
                    chunks=self._chunks(answer),
                )

    @asynccontextmanager
    async def connect(
        self, request: UpstreamRequest, subprotocols: Sequence[str]
    ) -> AsyncIterator[HttpSocket]:
        """See `Upstream.connect`."""
        with self._at_work(request.keys) as server:
            with self._reaching(server):
                try:
                    socket = await server.session.ws_connect(
                        URL(server.base + request.target, encoded=True),
                        headers=self._headers(request),
                        protocols=subprotocols,
                        max_msg_size=_MAX_MESSAGE_NBYTES,
                    )
                except aiohttp.WSServerHandshakeError as error:
                    raise InvalidRequest(
                        f"{self._title} takes no WebSocket there: it answers with status "
                        f"{error.status}"
                    ) from error
            async with socket:
                yield HttpSocket(socket, self._title)

    async def metrics(self) -> Sequence[tuple[str, bytes]]:
        """See `Upstream.metrics`."""
        pages = await asyncio.gather(*map(_page, self._servers))
        return [
            (server.url, page)
            for server, page in zip(self._servers, pages, strict=True)
            if page is not None
        ]

    async def stats(self) -> UpstreamStats | None:
        """See `Upstream.stats`."""
        return self._traits.stats_of([page for _, page in await self.metrics()])

    async def watch(self) -> None:
        """Check the health of all servers, again and again, until cancelled."""
        await asyncio.gather(*map(self._watch, self._servers))

    async def _watch(self, server: _Server) -> None:
        timeout = aiohttp.ClientTimeout(total=_LOOK_TIMEOUT_S)
        while True:
            was_ready = server.is_ready
            try:
                async with server.session.get(server.base + "/health", timeout=timeout) as answer:
                    server.is_ready = answer.status == 200
                    server.num_unanswered = 0
            except TimeoutError:  # probably busy: a server that does not listen refuses at once
                server.num_unanswered += 1
                server.is_ready = server.is_ready and server.num_unanswered < _MOST_UNANSWERED
            except (aiohttp.ClientError, OSError, RuntimeError):  # or out of threads, for a moment
                server.is_ready = False
            if was_ready and not server.is_ready:
                log.warning("%s is gone", self._title, extra={"url": server.url})
            elif server.is_ready and not was_ready:
                log.info("%s answers", self._title, extra={"url": server.url})
            await asyncio.sleep(_LOOK_S)

    @contextmanager
    def _at_work(self, keys: Sequence[bytes]) -> Iterator[_Server]:
        """Yield the server for a request, and count the request while the context lasts."""
        server = self._choose(keys)
        server.num_running += 1
        try:
            yield server
        finally:
            server.num_running -= 1

    def _choose(self, keys: Sequence[bytes]) -> _Server:
        """Return the server that has seen the first item (by hash), unless it has far more load."""
        ready = [server for server in self._servers if server.is_ready]
        if not ready:
            raise EngineUnavailable(f"{self._title} is not ready; try again")
        least = min(ready, key=lambda server: server.num_running)
        if not keys:
            return least
        favourite = max(ready, key=lambda server: _weight(keys[0], server.url))
        is_overloaded = favourite.num_running > least.num_running + _MORE_LOADED
        return least if is_overloaded else favourite

    @contextmanager
    def _reaching(self, server: _Server) -> Iterator[None]:
        """Convert errors of a connection.

        Raises:
            EngineUnavailable: The server was not reached.
        """
        try:
            yield
        except (aiohttp.ClientError, OSError) as error:
            is_absent = isinstance(error, aiohttp.ClientConnectorError)
            server.is_ready = server.is_ready and not is_absent
            raise EngineUnavailable(f"{self._title} does not answer; try again") from error

    async def _chunks(self, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        try:
            async for chunk in answer.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            went = f"{self._title} went away in the middle of an answer"
            raise EngineUnavailable(went) from error

    def _headers(self, request: UpstreamRequest) -> CIMultiDict[str]:
        kept = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in request.headers
            if (lower := name.lower()) not in _CONNECTIONS
            and not lower.startswith(_OF_SOCKETS)
            and not (self._key_header is not None and lower in _KEYS)
        ]
        if self._key_header is not None:
            name, value = self._key_header
            kept.append((name.decode(), value.decode()))
        return CIMultiDict(kept)


class HttpSocket:
    """Open WebSocket to an upstream; see `afferent.engines.upstream.UpstreamSocket`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, title: str) -> None:
        self._socket, self._title = socket, title

    @property
    def subprotocol(self) -> str | None:
        return self._socket.protocol

    @property
    def close_code(self) -> int:
        code = self._socket.close_code
        return _SENDABLE_CODES.get(code, code or 1000)

    async def send(self, message: str | bytes) -> None:
        try:
            if isinstance(message, str):
                await self._socket.send_str(message)
            else:
                await self._socket.send_bytes(message)
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnavailable(f"{self._title} went away") from error

    async def messages(self) -> AsyncIterator[str | bytes]:
        async for message in self._socket:
            if message.type in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                yield message.data

    async def close(self, code: int) -> None:
        await self._socket.close(code=code)


async def _is_well(server: _Server) -> bool:
    """Whether a server's engine runs; a server that does not answer in time may only be busy."""
    timeout = aiohttp.ClientTimeout(total=_WELL_TIMEOUT_S)
    try:
        async with server.session.get(server.base + "/health", timeout=timeout) as answer:
            is_well = answer.status == 200
    except TimeoutError:
        return True
    except (aiohttp.ClientError, OSError):
        is_well = False
    server.is_ready = server.is_ready and is_well
    return is_well


def _relative(location: bytes, base: str) -> bytes:
    """Return a URL without its server, if that is the upstream itself."""
    origin = base.encode()
    rest = location[len(origin) :]
    if location[: len(origin)].lower() != origin.lower() or rest[:1] not in (b"/", b"?", b"#", b""):
        return location
    if not rest.startswith(b"/"):
        rest = b"/" + rest
    return b"/." + rest if rest.startswith(b"//") else rest  # two slashes would begin a host


async def _page(server: _Server) -> bytes | None:
    """Return a server's metrics page; ``None`` if it does not answer."""
    timeout = aiohttp.ClientTimeout(total=_METRICS_TIMEOUT_S)
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with server.session.get(server.base + "/metrics", timeout=timeout) as answer:
            if answer.status == 200:
                return await answer.read()
    return None


def _weight(key: bytes, url: str) -> bytes:
    """Return the weight of a server for a key, by rendezvous hashing.

    A server that is added or removed changes nothing between the others.
    """
    return hashlib.blake2b(key + url.encode(), digest_size=8).digest()
