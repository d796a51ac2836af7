"""Fetches of URLs: addresses, requests, sizes, times and concurrency."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import httpcore
import pytest

from afferent.config import ServeConfig
from afferent.errors import FetchFailed, ForbiddenUrl, MediaTooLarge, NoPermitLeft
from afferent.media.fetch import fetch as fetch_module
from afferent.media.fetch.dial import Resolver
from afferent.media.fetch.fetch import Fetcher, FetchSession
from tests.media.media_host import media_host, send, send_raw, send_slowly

MAX_NBYTES = 1000


def fetching(
    where: str,
    use: Callable[[FetchSession], Coroutine[Any, Any, Any]],
    *,
    allowed: bool = True,
    budget: int = 10 * MAX_NBYTES,
    resolve: Any = None,
    grace_s: float = 3.0,
    **limits: Any,
) -> Any:
    """Return the result of ``use`` with a session whose fetcher may reach ``where``."""

    async def main() -> Any:
        allow = tuple(where.split()) if allowed else ()
        config = ServeConfig(fetch_allow=allow, **limits)
        fetcher = Fetcher(config, resolve=resolve, grace_s=grace_s)
        try:
            return await use(fetcher.session(max_nbytes=budget))
        finally:
            await fetcher.close()

    return asyncio.run(main())


def get(where: str, path: str, *, max_nbytes: int = MAX_NBYTES, **parameters: Any) -> bytes:
    url = f"http://{where.split()[0]}{path}"
    return fetching(
        where,
        lambda session: session.fetch(url, modality="image", max_nbytes=max_nbytes),
        **parameters,
    )


def resolve_to(*addresses: str, asked: list[str] | None = None) -> Any:
    async def resolve(host: str, port: int) -> list[str]:
        if asked is not None:
            asked.append(host)
        return list(addresses)

    return resolve


@pytest.fixture
def wait() -> Iterator[threading.Event]:
    """Yield an event that is set at the end of the test, to end the threads of hosts."""
    event = threading.Event()
    yield event
    event.set()


# Connections and requests


class SlowStream(httpcore.AsyncMockStream):
    """Stream of a host that lets other tasks run before each answer."""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        await asyncio.sleep(0)
        return await super().read(max_bytes, timeout)


class SlowHost(httpcore.AsyncMockBackend):
    async def connect_tcp(self, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        await asyncio.sleep(0)
        return SlowStream([b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", b"a", b"b"])


def test_cancelled_fetch_leaves_no_connection_in_use() -> None:
    """At some moments, a connection was never closed nor used again, until 256 of them ended all
    fetches.
    """

    async def main() -> None:
        for num_passes in range(40):
            fetcher = Fetcher(ServeConfig(fetch_allow=("a.test:80",)))
            fetcher._pool._network_backend = SlowHost([])  # type: ignore[attr-defined]
            session = fetcher.session(max_nbytes=10)
            fetching = session.fetch("http://a.test/", modality="image", max_nbytes=5)
            task = asyncio.create_task(fetching)
            for _ in range(num_passes):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                assert await task == b"ab"
            kept = fetcher._pool.connections
            assert all(each.is_idle() or each.is_closed() for each in kept), (num_passes, kept)
            await fetcher.close()

    asyncio.run(main())


def test_a_host_of_ones_own_can_be_allowed() -> None:
    seen: list[dict[str, str]] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        seen.append(dict(request.headers))
        send(b"content")(request)

    with media_host({"/a?b": answer}) as where:
        assert get(where, "/a?b#c") == b"content"
        with pytest.raises(ForbiddenUrl):
            get(where, "/a?b", allowed=False)
    assert seen == [{"Host": where, "Accept": "image/*", "Accept-Encoding": "identity"}]


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with media_host({"/a": send(b"content")}) as where:
        assert get(where, "/a") == b"content"


def test_every_answer_of_the_resolver_is_checked() -> None:
    """One public address among private ones is refused, and each name is resolved once."""
    asked: list[str] = []
    for addresses in (
        ["1.1.1.1", "127.0.0.1"],
        ["64:ff9b::7f00:1"],
        ["2606:4700::1111", "::ffff:10.0.0.1"],
    ):
        with pytest.raises(FetchFailed, match="no public address"):
            get(
                "rebind.example:80",
                "/",
                allowed=False,
                resolve=resolve_to(*addresses, asked=asked),
            )
    assert asked == ["rebind.example"] * 3


def test_numbers_that_are_addresses_are_checked_too() -> None:
    for host in ("2130706433", "0x7f.1", "127.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0"):
        with pytest.raises((ForbiddenUrl, FetchFailed)):
            get(host, "/", allowed=False)


def test_the_checked_address_is_the_one_that_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that changes its address between check and connection has no effect."""
    hosts: list[str] = []

    def answer(request: BaseHTTPRequestHandler) -> None:
        hosts.append(request.headers["Host"])
        send(b"content")(request)

    with media_host({"/a": answer}) as where:
        port = int(where.rsplit(":", 1)[1])
        name = f"images.example:{port}"

        def look_up(host: str, *arguments: Any, **parameters: Any) -> Any:
            assert host == "127.0.0.1", "a name was looked up a second time"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        asked: list[str] = []
        assert get(name, "/a", resolve=resolve_to("127.0.0.1", asked=asked)) == b"content"
        assert asked == ["images.example"]
    assert hosts == [name]


def test_tls_sees_the_hosts_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        name = f"images.example:{listener.getsockname()[1]}"
        hello: list[bytes] = []

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                hello.append(connection.recv(1 << 14))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(FetchFailed):
            fetching(
                name,
                lambda session: session.fetch(f"https://{name}/", modality="image", max_nbytes=1),
                resolve=resolve_to("127.0.0.1"),
            )
        thread.join()
    assert b"images.example" in hello[0]


def test_the_next_address_is_tried_if_one_refuses() -> None:
    with media_host({"/a": send(b"content")}) as where:
        port = where.rsplit(":", 1)[1]
        resolve = resolve_to("127.0.0.2", "127.0.0.1")
        assert get(f"two.example:{port}", "/a", resolve=resolve) == b"content"
        with pytest.raises(FetchFailed, match="not be reached"):
            get(f"two.example:{port}", "/a", resolve=resolve_to("127.0.0.2"))
        with pytest.raises(FetchFailed, match="not be reached"):
            get(f"two.example:{port}", "/a", resolve=resolve_to())


def test_so_many_addresses_are_tried_and_no_more() -> None:
    with media_host({"/a": send(b"content")}) as where:
        port = where.rsplit(":", 1)[1]
        others = [f"127.0.0.{n}" for n in range(2, 6)]
        resolve = resolve_to(*others[:3], "127.0.0.1")
        assert get(f"many.example:{port}", "/a", resolve=resolve) == b"content"
        with pytest.raises(FetchFailed, match="not be reached"):
            get(f"many.example:{port}", "/a", resolve=resolve_to(*others, "127.0.0.1"))


def test_hosts_that_nobody_asks_are_forgotten() -> None:
    async def main() -> None:
        fetcher = Fetcher(ServeConfig(fetch_allow=(where,)))
        session = fetcher.session(max_nbytes=100)
        url = f"http://{where}/a"
        fetches = [session.fetch(url, modality="image", max_nbytes=9) for _ in range(6)]
        assert await asyncio.gather(*fetches) == [b"content"] * 6
        with pytest.raises(FetchFailed):
            await session.fetch(f"http://{where}/gone", modality="image", max_nbytes=9)
        assert len(fetcher._places) == 0
        await fetcher.close()

    answers = {"/a": send(b"content"), "/gone": send(b"", 404)}
    with media_host(answers) as where:
        asyncio.run(main())


def test_look_ups_count_as_connecting() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        await asyncio.sleep(20)
        return []

    started = time.monotonic()
    with pytest.raises(FetchFailed, match="too long"):
        get("slow.example:80", "/", resolve=resolve, fetch_connect_timeout_s=0.1)
    assert time.monotonic() - started < 15


def test_the_systems_resolver() -> None:
    async def main() -> list[str]:
        resolver = Resolver()
        for name in ("no-such-name.invalid", "a..b", "a" * 70, "\u00e4\ud800"):
            with pytest.raises(FetchFailed, match="not found"):
                await resolver(name, 80)
        assert "127.0.0.1" in await resolver("localhost", 80)
        found = await resolver("127.0.0.1", 80)
        await resolver.close()
        return found

    assert asyncio.run(main()) == ["127.0.0.1"]


class NameServer(asyncio.DatagramProtocol):
    """A name server that knows ``good`` names, denies ``bad`` ones, and ignores all others."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: Any) -> None:
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode())
            at += 1 + data[at]
        name, question = ".".join(labels), data[12 : at + 5]
        self.asked.append(name)
        (kind,) = struct.unpack_from(">H", data, at + 1)
        if name.startswith("bad"):
            head = struct.pack(">2sHHHHH", data[:2], 0x8183, 1, 0, 0, 0)
            self._transport.sendto(head + question, address)
        elif name.startswith("good"):
            answer = b"\xc0\x0c" + struct.pack(">HHIH4s", 1, 1, 60, 4, bytes((1, 2, 3, 4)))
            answers = [answer] if kind == 1 else []
            head = struct.pack(">2sHHHHH", data[:2], 0x8180, 1, len(answers), 0, 0)
            self._transport.sendto(head + question + b"".join(answers), address)


def with_name_server(use: Callable[[Resolver, NameServer, list[float]], Awaitable[None]]) -> None:
    async def main() -> None:
        loop, now_s = asyncio.get_running_loop(), [100.0]
        transport, server = await loop.create_datagram_endpoint(
            NameServer, local_addr=("127.0.0.1", 0)
        )
        port = transport.get_extra_info("sockname")[1]
        resolver = Resolver([f"127.0.0.1:{port}"], clock=lambda: now_s[0])
        await use(resolver, server, now_s)
        await resolver.close()
        transport.close()

    asyncio.run(main())


def test_names_that_nobody_answers_for_hold_nobody_up() -> None:
    async def use(resolver: Resolver, _: NameServer, __: list[float]) -> None:
        dead = [asyncio.create_task(resolver(f"dead-{n}.example", 80)) for n in range(300)]
        await asyncio.sleep(0)
        assert await resolver("good.example", 80) == ["1.2.3.4"]
        assert not any(each.done() for each in dead)
        for each in dead:
            each.cancel()
        await asyncio.wait(dead)

    with_name_server(use)


def test_what_was_not_found_is_not_asked_for_again_for_a_moment() -> None:
    async def use(resolver: Resolver, server: NameServer, now_s: list[float]) -> None:
        for _ in range(5):
            with pytest.raises(FetchFailed, match="not found"):
                await resolver("bad.example", 80)
        num_asked = len(server.asked)
        assert 0 < num_asked <= 4
        now_s[0] += 60
        with pytest.raises(FetchFailed, match="not found"):
            await resolver("bad.example", 80)
        for number in range(5000):
            resolver._note(f"other-{number}")
        assert len(resolver._not_found) <= 4096

    with_name_server(use)


def test_more_fetches_than_there_may_be_are_no_fault_of_the_client(
    monkeypatch: pytest.MonkeyPatch, wait: threading.Event
) -> None:
    monkeypatch.setattr(fetch_module, "_MAX_CONNECTIONS", 1)

    def slow(request: BaseHTTPRequestHandler) -> None:
        wait.wait(5)
        send(b"content")(request)

    async def main(where: str) -> None:
        limits = ServeConfig(fetch_allow=(where,), fetch_connect_timeout_s=0.2)
        fetcher = Fetcher(limits)
        first, second = (fetcher.session(max_nbytes=100) for _ in range(2))
        url = f"http://{where}/slow"
        fetching = asyncio.create_task(first.fetch(url, modality="image", max_nbytes=9))
        while not fetcher._pool.connections:
            await asyncio.sleep(0.001)
        with pytest.raises(NoPermitLeft, match="try again"):
            await second.fetch(url, modality="image", max_nbytes=9)
        wait.set()
        assert await fetching == b"content"
        await fetcher.close()

    with media_host({"/slow": slow}) as where:
        asyncio.run(main(where))


def test_redirects_are_checked_again() -> None:
    with media_host({}) as forbidden:
        answers = {
            "/ok": send(b"content"),
            "/3": send(b"", 302, Location="/2"),
            "/2": send(b"", 307, Location="/1"),
            "/1": send(b"", 308, Location="/ok"),
            "/4": send(b"", 302, Location="/3"),
            "/loop": send(b"", 302, Location="/loop"),
            "/metadata": send(b"", 302, Location="http://169.254.169.254/latest"),
            "/file": send(b"", 302, Location="file:///etc/passwd"),
            "/user": send(b"", 302, Location="http://me@example.com/"),
            "/other": send(b"", 302, Location=f"http://{forbidden}/"),
            "/private": send(b"", 302, Location="http://127.0.0.1/"),
            "/nowhere": send(b"", 302),
            "/chosen": send(b"content", 300, Location="/ok"),
        }
        with media_host(answers) as where:
            assert get(where, "/3") == b"content"
            for path in ("/metadata", "/file", "/user", "/other", "/private"):
                with pytest.raises(ForbiddenUrl):
                    get(where, path)
            for path in ("/4", "/loop", "/nowhere", "/chosen"):
                with pytest.raises(FetchFailed):
                    get(where, path)


def test_the_time_of_redirects_adds_up(wait: threading.Event) -> None:
    def slow(request: BaseHTTPRequestHandler) -> None:
        wait.wait(0.25)
        send(b"", 302, Location="/slow")(request)

    with media_host({"/slow": slow}) as where, pytest.raises(FetchFailed, match="too long"):
        get(where, "/slow", fetch_total_timeout_s=0.6)


# Sizes


def test_encodings_that_were_not_asked_for() -> None:
    answers = {
        "/gzip": send(b"x", Content_Encoding="gzip"),
        "/both": send_raw(
            b"HTTP/1.1 200 OK\r\nContent-Encoding: br\r\ncontent-encoding: identity\r\n"
            b"Content-Length: 1\r\n\r\nx"
        ),
        "/list": send(b"x", Content_Encoding="identity, gzip"),
        "/identity": send(b"x", Content_Encoding="Identity"),
    }
    with media_host(answers) as where:
        assert get(where, "/identity") == b"x"
        for path in ("/gzip", "/both", "/list"):
            with pytest.raises(FetchFailed, match="encoding"):
                get(where, path)


def test_sizes_announced_and_not(wait: threading.Event) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n"
    answers = {
        "/fits": send(b"x" * MAX_NBYTES),
        "/announced": send_slowly(b"", num=1, pause_s=20, length=MAX_NBYTES + 1, wait=wait),
        "/endless": send_slowly(b"x" * 500, num=1 << 30, pause_s=0, wait=wait),
        "/chunked": send_raw(chunked + b"\r\n" + b"1f4\r\n" + b"x" * 500 + b"\r\n0\r\n\r\n"),
        "/chunks": send_raw(chunked + b"\r\n" + (b"1f4\r\n" + b"x" * 500 + b"\r\n") * 9),
        "/two": send_raw(chunked + b"Content-Length: 1001\r\n\r\n0\r\n\r\n"),
        "/more": send_raw(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nxxx" + b"y" * 3000),
    }
    with media_host(answers) as where:
        assert get(where, "/fits") == b"x" * MAX_NBYTES
        assert get(where, "/chunked") == b"x" * 500
        assert get(where, "/more") == b"xxx"
        started = time.monotonic()
        for path in ("/announced", "/endless", "/chunks", "/two"):
            with pytest.raises(MediaTooLarge, match="more than 1000 bytes"):
                get(where, path)
        assert time.monotonic() - started < 15


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\x01nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
        b"HTTP/1.1 206 Partial\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
    ],
)
def test_answers_that_are_no_media(answer: bytes) -> None:
    with media_host({"/": send_raw(answer)}) as where, pytest.raises(FetchFailed):
        get(where, "/")


def test_fetches_side_by_side_never_exceed_their_budget(wait: threading.Event) -> None:
    """Announced bytes of one fetch are reserved before they arrive."""
    delivered: dict[str, int] = {"/first": 0, "/second": 0, "/third": 0}
    answers = {
        "/first": send_slowly(b"x" * 300, num=2, pause_s=0.3, length=600, wait=wait),
        "/second": send(b"x" * 401),
        "/third": send_slowly(b"x" * 100, num=5, pause_s=0, wait=wait),
        "/fourth": send(b"x" * 400),
    }

    async def use(session: FetchSession) -> None:
        async def fetch(path: str) -> int:
            def sink(data: bytes) -> None:
                delivered[path] += len(data)

            return await session.fetch_into(
                f"http://{where}{path}", sink, modality="image", max_nbytes=MAX_NBYTES
            )

        first = asyncio.create_task(fetch("/first"))
        while not delivered["/first"]:
            await asyncio.sleep(0.01)
        for path in ("/second", "/third"):
            with pytest.raises(MediaTooLarge, match=r"more than 1000 bytes in all.*--max-body"):
                await fetch(path)
        delivered["/fourth"] = 0
        assert (await fetch("/fourth")).nbytes == 400
        assert (await first).nbytes == 600

    with media_host(answers) as where:
        fetching(where, use, budget=1000)
    assert delivered["/second"] == 0
    assert delivered["/third"] <= 400
    assert delivered["/first"] + delivered["/fourth"] == 1000


def test_nothing_large_is_held_in_memory() -> None:
    body = bytes(16 << 20)
    nbytes = largest = 0

    def sink(data: bytes) -> None:
        nonlocal nbytes, largest
        nbytes += len(data)
        largest = max(largest, len(data))

    def use(session: FetchSession) -> Any:
        url = f"http://{where}/"
        return session.fetch_into(url, sink, modality="video", max_nbytes=len(body))

    with media_host({"/": send(body)}) as where:
        tracemalloc.start()
        assert fetching(where, use, budget=len(body)).nbytes == len(body)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert nbytes == len(body)
    assert largest <= 64 << 10
    assert peak < 8 << 20


def test_errors_of_the_sink_come_through() -> None:
    class Full(Exception):
        pass

    def sink(data: bytes) -> None:
        raise Full

    with media_host({"/": send(b"x")}) as where, pytest.raises(Full):
        fetching(
            where,
            lambda session: session.fetch_into(
                f"http://{where}/", sink, modality="image", max_nbytes=9
            ),
        )


# Times


def test_hosts_that_fall_silent(wait: threading.Event) -> None:
    def dumb(request: BaseHTTPRequestHandler) -> None:
        wait.wait(20)

    answers = {
        "/dumb": dumb,
        "/silent": send_slowly(b"x", num=1, pause_s=20, length=10, wait=wait),
    }
    with media_host(answers) as where:
        for path in answers:
            with pytest.raises(FetchFailed, match="too long"):
                get(where, path, fetch_idle_timeout_s=0.2)
            with pytest.raises(FetchFailed, match="too long"):
                get(where, path, fetch_total_timeout_s=0.2)


def test_each_modality_has_its_own_time(wait: threading.Event) -> None:
    def fetch(modality: str) -> Any:
        return fetching(
            where,
            lambda session: session.fetch(
                f"http://{where}/{modality}", modality=modality, max_nbytes=MAX_NBYTES
            ),
            fetch_total_timeout_s=0.1,
            fetch_audio_timeout_s=0.15,
            fetch_video_timeout_s=20.0,
        )

    answers = {
        f"/{modality}": send_slowly(b"x", num=1, pause_s=pause_s, length=2, wait=wait)
        for modality, pause_s in (("image", 20), ("audio", 20), ("video", 0.5))
    }
    with media_host(answers) as where:
        for modality in ("image", "audio"):
            with pytest.raises(FetchFailed, match="too long"):
                fetch(modality)
        with pytest.raises(FetchFailed, match="not be reached"):  # it is closed too early
            fetch("video")


def test_hosts_that_are_too_slow(wait: threading.Event) -> None:
    answers = {
        "/drip": send_slowly(b"x", num=1000, pause_s=0.02, wait=wait),
        # The first piece alone would satisfy the minimal rate for ten seconds.
        "/fair": send_slowly(b"x" * 4000, num=10, pause_s=0.02, wait=wait),
        "/grace": send_slowly(b"x", num=5, pause_s=0.02, wait=wait),
    }
    with media_host(answers) as where:
        with pytest.raises(FetchFailed, match="fewer than 400 bytes a second"):
            get(where, "/drip", fetch_min_nbytes_per_s=400, grace_s=0.1)
        fair = get(
            where,
            "/fair",
            max_nbytes=40_000,
            budget=40_000,
            fetch_min_nbytes_per_s=400,
            grace_s=0.1,
        )
        assert fair == b"x" * 40_000
        assert get(where, "/grace", fetch_min_nbytes_per_s=400, grace_s=10) == b"x" * 5


# Concurrency


@pytest.mark.parametrize(
    ("num_sessions", "per_host", "most"), [(1, 5, 5), (3, 5, 5), (1, 50, 32), (2, 50, 50)]
)
def test_few_fetches_at_a_time(
    num_sessions: int, per_host: int, most: int, wait: threading.Event
) -> None:
    """At most 32 fetches for one request; for all requests together, the limit of the host."""
    running = highest = 0
    lock, is_full = threading.Lock(), threading.Event()

    def answer(request: BaseHTTPRequestHandler) -> None:
        nonlocal running, highest
        with lock:
            running += 1
            highest = max(highest, running)
            if highest >= most:
                is_full.set()
        is_full.wait(30)
        wait.wait(0.05)
        with lock:
            running -= 1
        send(b"x")(request)

    async def main() -> list[bytes]:
        times = {"fetch_idle_timeout_s": 60.0, "fetch_total_timeout_s": 60.0}
        limits = ServeConfig(fetch_allow=(where,), fetch_max_per_host=per_host, **times)
        fetcher = Fetcher(limits)
        sessions = [fetcher.session(max_nbytes=100) for _ in range(num_sessions)]
        fetches = [
            session.fetch(f"http://{where}/", modality="image", max_nbytes=1)
            for session in sessions
            for _ in range(40)
        ]
        try:
            return await asyncio.gather(*fetches)
        finally:
            await fetcher.close()

    with media_host({"/": answer}) as where:
        assert asyncio.run(main()) == [b"x"] * 40 * num_sessions
    assert highest == most


def test_waiting_for_a_place_is_not_the_hosts_time(wait: threading.Event) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        wait.wait(0.25)
        send(b"x")(request)

    async def use(session: FetchSession) -> list[bytes]:
        url = f"http://{where}/"
        fetches = [session.fetch(url, modality="image", max_nbytes=1) for _ in range(12)]
        return await asyncio.gather(*fetches)

    with media_host({"/": answer}) as where:
        done = fetching(where, use, fetch_max_per_host=1, fetch_total_timeout_s=2.5)
    assert done == [b"x"] * 12
