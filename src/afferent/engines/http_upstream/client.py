"""HTTP client of one or several servers of an upstream."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from afferent.engines.http_upstream.addresses import Address
from afferent.engines.http_upstream.conversation import conversation_of
from afferent.engines.http_upstream.placement import (
    Placement,
    Prefixes,
    Replica,
    RetryBudget,
    blocks_of,
)
from afferent.engines.http_upstream.server import Server
from afferent.engines.http_upstream.sources import Sources
from afferent.engines.references import Reference, sign
from afferent.engines.upstream import (
    NamedBody,
    NameOf,
    RepeatableBody,
    UpstreamAnswer,
    UpstreamRequest,
    UpstreamStats,
)
from afferent.errors import AfferentError, EngineUnavailable, InvalidRequest
from afferent.telemetry.registry import counter
from afferent.types import Modality

if TYPE_CHECKING:
    from afferent.engines.http_upstream.item_follower import ItemFollower

log = logging.getLogger(__name__)

_SALT_TAG = b"afferent/salt-key/v1"
_LOOK_S = 1.0
_SOURCES_LOOK_S = 2.0
_MOST_TRIES = 3
"""Servers that are tried for a request."""
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
_ERRORS = 400
"""Least status of an error."""
_FAILED = 500
"""Status of an API server when its engine has ended, among other cases."""
_AGAIN = frozenset({502, 503, 504})
"""Statuses of a server that has not processed a request: another one may."""
_FAILURES = frozenset({_FAILED, 502, 504})
"""Statuses of a server that fails; 503 is usual where there is too much load."""
_KEYS = frozenset({b"authorization", b"x-api-key"})
_OF_SOCKETS = b"sec-websocket-"
"""Prefix of further headers about one connection."""
_MAX_MESSAGE_NBYTES = 16 << 20
_OPEN_TIMEOUT_S = 30.0
"""Longest handshake of a WebSocket."""
_SENDABLE_CODES = {None: 1000, 1005: 1000, 1006: 1013}
"""Close codes to forward instead of those that only report a missing code: normal end; try again
later.
"""

RETRIES = counter(
    "afferent_upstream_retries_total",
    "Requests that were sent to another server, as one had failed before its answer began",
)
EJECTIONS = counter(
    "afferent_upstream_ejections_total",
    "Times that a server got no requests for a while, as too many had failed",
)
NAMED = counter(
    "afferent_upstream_named_items_total",
    "Items that were sent by their names alone, by whether the server had them; it then got the "
    "data at once",
    outcome=("known", "unknown"),
)
PLACEMENTS = counter(
    "afferent_upstream_placements_total",
    "Requests by the choice of their server: one that is known to have their media, or most of "
    "their text; the first in the order of their media or text; another one as it had its share of "
    "the load; or the least loaded one without such an order",
    choice=("known", "first", "other", "least_loaded"),
)


class ServerTraits:
    """Differences between any HTTP server and one of a certain kind, which overrides them."""

    takes_any_file = False
    """See `Upstream.takes_any_file`."""
    name_of: NameOf | None = None
    """See `Upstream.name_of`."""
    reads_arena = True
    """See `Upstream.reads_arena`."""
    takes_videos = True
    """See `Upstream.takes_videos`."""
    takes_salt = True
    """See `Upstream.takes_salt`."""
    needs_health = True
    """Whether a server takes requests only if ``GET /health`` has the status 200."""
    has_metrics = True
    """Whether the servers' metrics belong on this server's page."""
    min_streamed_nbytes = 0
    """See `Upstream.min_streamed_nbytes`."""
    unknown_name_statuses: frozenset[int] = frozenset()
    """Statuses of a server that has got an item by its name and does not know it, among other
    cases; empty for servers to which items are always sent.
    """

    def takes(self, modality: Modality, file: bytes | memoryview | None) -> bool:
        """See `Upstream.takes`."""
        return True

    def stats_of(self, pages: Sequence[bytes]) -> UpstreamStats | None:
        """Return the statistics in the servers' metrics pages; ``None`` if there are none."""
        return None


@dataclass(frozen=True, slots=True)
class ItemEvents:
    """Place of the item events of an upstream's servers.

    Attributes:
        port: Port on each server's host.
        key: Key that they ask for; empty for none.
    """

    port: int
    key: str = ""

    def of(self, host: str) -> ItemFollower:
        """Return the follower of a server on this host."""
        from afferent.engines.http_upstream.item_follower import ItemFollower  # needs ZeroMQ

        return ItemFollower(host, self.port, key=self.key)


@dataclass(frozen=True, slots=True)
class _Spot:
    """Wish of a request for a server."""

    key: bytes
    preferred: Collection[str] = ()
    """Names of servers that have the item, or have seen the text."""
    blocks: Sequence[bytes] = ()


class Begun:
    """Request that a server gets while its body arrives; see
    `afferent.engines.upstream.BegunRequest`.

    Invariants:
        - It counts as one of its server's running requests until `close`.
        - Its connection is never used again, unless the server has got the whole body.
    """

    def __init__(
        self,
        server: Server,
        answer: Coroutine[Any, Any, aiohttp.ClientResponse],
        on_end: Callable[[], None],
    ) -> None:
        self.server = server
        self._task = asyncio.create_task(answer)
        self._task.add_done_callback(lambda _: on_end())
        self._is_closed = False
        server.replica.num_running += 1

    async def answer(self) -> aiohttp.ClientResponse:
        """Return the answer, once it has begun.

        Raises:
            aiohttp.ClientError, OSError: The connection failed.
        """
        return await self._task

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.server.replica.num_running -= 1
        self._task.cancel()
        self._task.add_done_callback(_close_answer)


def _close_answer(task: asyncio.Task[aiohttp.ClientResponse]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


class HttpClient:
    """HTTP client of an upstream's servers; see `afferent.engines.upstream.Upstream`.

    Invariants:
        - ``_servers`` and the placement have the same servers.
        - A server that left the sources is closed when its last request has ended.
    """

    def __init__(
        self,
        *,
        title: str,
        secret: bytes,
        traits: ServerTraits,
        trust: ssl.SSLContext | None = None,
        route_header: str = "",
        events: ItemEvents | None = None,
    ) -> None:
        self._title, self._secret = title, secret
        self._traits, self._trust = traits, trust
        # See `Upstream`:
        self.reads_arena, self.takes_salt = traits.reads_arena, traits.takes_salt
        self.takes_names = bool(traits.unknown_name_statuses)
        self.min_streamed_nbytes = traits.min_streamed_nbytes
        self.takes_any_file, self.takes_videos = traits.takes_any_file, traits.takes_videos
        self.takes, self.name_of = traits.takes, traits.name_of
        self._route_header = route_header.lower().encode()
        self._placement, self._prefixes, self._budget = Placement(), Prefixes(), RetryBudget()
        self._servers: dict[str, Server] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._events = events
        self._followers: dict[str, ItemFollower] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._has_started = False

    @classmethod
    @asynccontextmanager
    async def over(
        cls,
        sources: Sources,
        *,
        title: str,
        secret: bytes = b"",
        traits: ServerTraits | None = None,
        trust: ssl.SSLContext | None = None,
        route_header: str = "",
        events: ItemEvents | None = None,
    ) -> AsyncIterator[Self]:
        """Yield a client of the servers at these addresses, which checks their health.

        Args:
            title: Their name in messages.
            secret: Signs the references.
            traits: Traits of such servers; by default, those of any HTTP server.
            trust: Certificate authorities of their certificates; ``None``: those of the system.
            route_header: Header that gets the key of a request's placement, if it is not empty.
            events: Place of the servers' item events; ``None`` if they are not followed.
        """
        client = cls(
            title=title,
            secret=secret,
            traits=traits or ServerTraits(),
            trust=trust,
            route_header=route_header,
            events=events,
        )
        await client.follow(sources)
        client._has_started = True
        following = asyncio.create_task(client.keep_following(sources))
        try:
            yield client
        finally:
            following.cancel()
            tasks = [*client._watching.values(), *client._following.values(), *client._leaving]
            for task in tasks:
                task.cancel()
            await asyncio.wait([following, *tasks])
            for server in client._servers.values():
                await server.session.close()

    @property
    def is_ready(self) -> bool:
        return any(replica.is_ready for replica in self._placement.replicas)

    @property
    def num_servers(self) -> int:
        """See `Upstream.num_servers`."""
        return sum(replica.is_ready for replica in self._placement.replicas)

    @property
    def salt_key(self) -> bytes:
        """See `Upstream.salt_key`."""
        return hmac.new(self._secret, _SALT_TAG, hashlib.sha256).digest()

    def sign(self, reference: Reference) -> str:
        return sign(reference, self._secret)

    def begin(self, request: UpstreamRequest, on_end: Callable[[], None]) -> Begun:
        """See `Upstream.begin`."""
        spot = self._spot(request)
        server = self._choose(spot, ())
        waiting = self._waiting(server, may_retry=self._has_other({server.replica}))

        async def answered() -> aiohttp.ClientResponse:
            async with waiting:
                return await self._send(server, request, spot)

        return Begun(server, answered(), on_end)

    @asynccontextmanager
    async def forward(self, request: UpstreamRequest) -> AsyncIterator[UpstreamAnswer]:
        """See `Upstream.forward`."""
        async with AsyncExitStack() as stack:
            yield await self._answered(request, stack)

    async def _answered(self, request: UpstreamRequest, stack: AsyncExitStack) -> UpstreamAnswer:
        """Return an answer that has begun, of the first server that gives one.

        A request whose body can be sent again goes to another server after a failure, as long as no
        byte of an answer has come.
        """
        begun = request.begun if isinstance(request.begun, Begun) else None
        spot, tried = self._spot(request), set[Replica]()
        self._budget.earn()
        while True:
            server = self._choose(spot, tried) if begun is None else begun.server
            tried.add(server.replica)
            may_retry = (
                isinstance(request.body, bytes | RepeatableBody)
                and len(tried) < _MOST_TRIES
                and self._budget.has_any
                and self._has_other(tried)
            )
            async with AsyncExitStack() as attempt:
                try:
                    answer = await self._attempt(
                        server, request, spot, attempt, may_retry=may_retry, begun=begun
                    )
                except EngineUnavailable as error:
                    self._note(server, has_failed=True)
                    has_begun = isinstance(error.__cause__, aiohttp.ClientResponseError)
                    if has_begun or not may_retry:
                        raise
                else:
                    self._note(server, has_failed=answer.status in _FAILURES)
                    is_again = may_retry and answer.status in _AGAIN and self._budget.has_any
                    if not is_again:
                        stack.push_async_exit(attempt.pop_all())
                        self._prefixes.note(spot.blocks, server.replica.name)
                        return answer
            begun = None
            RETRIES.labels().inc()
            self._budget.spend()

    async def _attempt(
        self,
        server: Server,
        request: UpstreamRequest,
        spot: _Spot,
        attempt: AsyncExitStack,
        *,
        may_retry: bool,
        begun: Begun | None = None,
    ) -> UpstreamAnswer:
        if begun is not None:
            attempt.callback(begun.close)
            return await self._sent(
                server, request, spot, attempt, may_retry=may_retry, begun=begun
            )
        attempt.enter_context(self._at_work(server))
        body = request.body
        if not self.takes_names or not isinstance(body, NamedBody):
            return await self._sent(server, request, spot, attempt, may_retry=may_retry)
        if left_out := server.known.among(body.names):
            short = replace(request, body=body.without(left_out))
            async with AsyncExitStack() as first:
                answer = await self._sent(server, short, spot, first, may_retry=may_retry)
                if answer.status not in self._traits.unknown_name_statuses:
                    NAMED.labels("known").inc(len(left_out))
                    attempt.push_async_exit(first.pop_all())
                    return answer
            server.known.forget(left_out)
            NAMED.labels("unknown").inc(len(left_out))
        answer = await self._sent(server, request, spot, attempt, may_retry=may_retry)
        if answer.status < _ERRORS:
            server.known.note(body.names)
        return answer

    async def _sent(
        self,
        server: Server,
        request: UpstreamRequest,
        spot: _Spot,
        attempt: AsyncExitStack,
        *,
        may_retry: bool,
        begun: Begun | None = None,
    ) -> UpstreamAnswer:
        """Return a server's answer, once it has begun; it ends with ``attempt``."""
        with self._reaching(server):
            async with self._waiting(server, may_retry=may_retry):
                if begun is None:
                    answer = await self._send(server, request, spot)
                else:
                    answer = await begun.answer()
                await attempt.enter_async_context(answer)
                first = await answer.content.readany()
        if answer.status == _FAILED and not await server.is_well():
            raise EngineUnavailable(f"{self._title}'s engine has ended; try again")
        return UpstreamAnswer(
            status=answer.status,
            headers=[
                (name, _relative(value, server.base))
                if name.lower() in _LOCATIONS
                else (name, value)
                for name, value in answer.raw_headers
                if name.lower() not in _OF_ANSWERS
            ],
            chunks=self._chunks(first, answer),
        )

    async def _send(
        self, server: Server, request: UpstreamRequest, spot: _Spot
    ) -> aiohttp.ClientResponse:
        return await server.session.request(
            request.method,
            URL(server.base + request.target, encoded=True),
            headers=self._headers(request, server, spot),
            data=_sendable(request.body),
            allow_redirects=False,
        )

    @staticmethod
    def _waiting(server: Server, *, may_retry: bool) -> AbstractAsyncContextManager[None]:
        return server.while_ready() if may_retry else contextlib.nullcontext()

    @asynccontextmanager
    async def connect(
        self, request: UpstreamRequest, subprotocols: Sequence[str]
    ) -> AsyncIterator[HttpSocket]:
        """See `Upstream.connect`."""
        spot = _Spot(request.placement, self._holders(request.placement))
        server = self._choose(spot, ())
        with self._at_work(server):
            with self._reaching(server):
                try:
                    async with asyncio.timeout(_OPEN_TIMEOUT_S):
                        socket = await server.session.ws_connect(
                            URL(server.base + request.target, encoded=True),
                            headers=self._headers(request, server, spot),
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
        if not self._traits.has_metrics:
            return []
        servers = list(self._servers.values())
        pages = await asyncio.gather(*(server.metrics() for server in servers))
        return [
            (server.address.name, page)
            for server, page in zip(servers, pages, strict=True)
            if page is not None
        ]

    async def stats(self) -> UpstreamStats | None:
        """See `Upstream.stats`."""
        return self._traits.stats_of([page for _, page in await self.metrics()])

    # Servers

    async def follow(self, sources: Sources) -> None:
        """Add the servers that are new in the sources; drain those that have left them."""
        failed = set(sources.failures)
        found = await sources.look()
        for each in sources.failures.keys() - failed:
            log.warning("%s: %s", self._title, sources.failures[each])
        for name, address in found.items():
            if name in self._servers and self._servers[name].address == address:
                continue
            if name in self._servers:
                self._drop(name)
            self._add(name, address)
        for name in self._servers.keys() - found.keys():
            self._drop(name)

    async def keep_following(self, sources: Sources) -> None:
        """Call `follow` again and again, until cancelled; once, if the sources never change."""
        while not sources.is_fixed:
            await asyncio.sleep(_SOURCES_LOOK_S)
            await self.follow(sources)

    def _add(self, name: str, address: Address) -> None:
        server = Server(
            address,
            self._placement.add(name, is_late=self._has_started),
            trust=self._trust,
            needs_health=self._traits.needs_health,
        )
        self._servers[name] = server
        self._watching[name] = asyncio.create_task(self._watch(server))
        if self._events is not None and address.host:
            follower = self._events.of(address.host)
            self._followers[name] = follower
            self._following[name] = asyncio.create_task(follower.keep_following())

    def _drop(self, name: str) -> None:
        server = self._servers.pop(name)
        self._placement.remove(server.replica)
        watching = self._watching.pop(name)
        if self._followers.pop(name, None) is not None:
            self._following.pop(name).cancel()
        draining = asyncio.create_task(self._drain(server, watching))
        self._leaving.add(draining)
        draining.add_done_callback(self._leaving.discard)

    async def _drain(self, server: Server, watching: asyncio.Task[None]) -> None:
        """Close a server that has left, when its requests have ended."""
        log.info("%s has left", self._title, extra={"url": server.address.name})
        try:
            while server.replica.num_running:
                await asyncio.sleep(_LOOK_S)
        finally:
            watching.cancel()
            await server.session.close()

    async def _watch(self, server: Server) -> None:
        """Check the health of a server again and again, until cancelled."""
        while True:
            is_ready = await server.look(self._title)
            self._placement.set_ready(server.replica, is_ready=is_ready, now_s=time.monotonic())
            await asyncio.sleep(_LOOK_S)

    # Choice

    def _spot(self, request: UpstreamRequest) -> _Spot:
        if request.placement:
            return _Spot(request.placement, self._holders(request.placement))
        if not isinstance(request.body, bytes) or not request.body:
            return _Spot(b"")
        if len(self._servers) < 2 and not self._route_header:
            return _Spot(b"")
        key, text = conversation_of(request.body)
        blocks = blocks_of(text)
        return _Spot(key, [self._prefixes.find(blocks)], blocks)

    def _holders(self, placement: bytes) -> list[str]:
        """Return the names of the servers that have an item with this placement digest."""
        return [name for name, each in self._followers.items() if each.items.has(placement)]

    def _choose(self, spot: _Spot, excluded: Collection[Replica]) -> Server:
        """Return the server for a request.

        Raises:
            EngineUnavailable: None is ready.
        """
        choice = self._placement.choose(
            spot.key, now_s=time.monotonic(), preferred=spot.preferred, excluded=excluded
        )
        if choice is None:
            raise EngineUnavailable(f"{self._title} is not ready; try again")
        PLACEMENTS.labels(choice.how).inc()
        return self._servers[choice.replica.name]

    def _has_other(self, tried: Collection[Replica]) -> bool:
        now_s = time.monotonic()
        others = (each for each in self._placement.replicas if each not in tried)
        return any(each.weight(now_s) > 0 for each in others)

    def _note(self, server: Server, *, has_failed: bool) -> None:
        now_s = time.monotonic()
        if self._placement.note(server.replica, has_failed=has_failed, now_s=now_s):
            EJECTIONS.labels().inc()
            extra = {"url": server.address.name}
            log.warning("%s fails, and gets no requests for a while", self._title, extra=extra)

    @contextmanager
    def _at_work(self, server: Server) -> Iterator[None]:
        """Count a request of a server while the context lasts."""
        server.replica.num_running += 1
        try:
            yield
        finally:
            server.replica.num_running -= 1

    @contextmanager
    def _reaching(self, server: Server) -> Iterator[None]:
        """Convert errors of a connection.

        Raises:
            EngineUnavailable: The server was not reached.
            AfferentError: The body raised it while it was sent.
        """
        try:
            yield
        except (aiohttp.ClientError, OSError) as error:  # `TimeoutError` is an `OSError`
            if isinstance(error.__cause__, AfferentError):  # of the body, such as lost media
                raise error.__cause__ from error
            is_absent = isinstance(error, aiohttp.ClientConnectorError)
            server.replica.is_ready = server.replica.is_ready and not is_absent
            raise EngineUnavailable(f"{self._title} does not answer; try again") from error

    # Messages

    async def _chunks(self, first: bytes, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        if first:
            yield first
        try:
            async for chunk in answer.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError) as error:
            went = f"{self._title} went away in the middle of an answer"
            raise EngineUnavailable(went) from error

    def _headers(self, request: UpstreamRequest, server: Server, spot: _Spot) -> CIMultiDict[str]:
        key = server.address.api_key
        kept = [
            (name.decode("latin-1"), _text(value))
            for name, value in request.headers
            if (lower := name.lower()) not in _CONNECTIONS
            and not lower.startswith(_OF_SOCKETS)
            and not (key and lower in _KEYS)
            and not (spot.key and lower == self._route_header)
        ]
        if key:
            kept.append(("authorization", f"Bearer {key}"))
        if self._route_header and spot.key:
            kept.append((self._route_header.decode(), spot.key.hex()))
        if not isinstance(request.body, bytes) and isinstance(request.body, RepeatableBody):
            kept.append(("content-length", str(request.body.nbytes)))
        return CIMultiDict(kept)


def _text(value: bytes) -> str:
    """Return a header's value as the client library takes it, which encodes it in UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


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


def _sendable(
    body: bytes | RepeatableBody | AsyncIterator[bytes],
) -> bytes | AsyncIterator[bytes] | None:
    if isinstance(body, bytes):  # first: a check against a protocol takes ten microseconds
        return body or None
    return body.chunks() if isinstance(body, RepeatableBody) else body


def _relative(location: bytes, base: str) -> bytes:
    """Return a URL without its server, if that is the upstream itself."""
    origin = base.encode()
    rest = location[len(origin) :]
    if location[: len(origin)].lower() != origin.lower() or rest[:1] not in (b"/", b"?", b"#", b""):
        return location
    if not rest.startswith(b"/"):
        rest = b"/" + rest
    return b"/." + rest if rest.startswith(b"//") else rest  # two slashes would begin a host
