"""The transfer of a body while it arrives: its last bytes, its pace, and its ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from afferent.engines.upstream import UpstreamRequest
from afferent.errors import EngineUnavailable
from afferent.proxy import body_stream
from afferent.proxy.body_stream import STREAMED, ArrivingBody, BodyStream

REQUEST = UpstreamRequest(method="POST", target="/v1/chat/completions", headers=(), body=b"")
PLACEMENT = b"placement of the first item"
HEAD = "data:image/png;base64,"


async def passes() -> None:
    """Let all tasks go on as far as they can."""
    for _ in range(10):
        await asyncio.sleep(0)


class Taker:
    """Task that takes a body, and what it has taken."""

    def __init__(self, body: ArrivingBody) -> None:
        self.taken = b""
        self.task = asyncio.create_task(self._take(body))

    async def _take(self, body: ArrivingBody) -> None:
        async for chunk in body.chunks():
            self.taken += chunk


class Begun:
    """See `BegunRequest`."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Engine:
    """Upstream that takes one body."""

    def __init__(self) -> None:
        self.begun = Begun()
        self.is_running = True
        self.placements: list[bytes] = []

    def begin(self, request: UpstreamRequest, on_end: Callable[[], None]) -> Begun:
        if not self.is_running:
            raise EngineUnavailable("not now")
        assert isinstance(request.body, ArrivingBody)
        self.on_end, self.placements = on_end, [*self.placements, request.placement]
        self.taker = Taker(request.body)
        return self.begun


class Reader:
    """Reader of a body whose first item is known from a certain number of bytes on."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.num_read = 0

    def first_item(self, nbytes: int) -> tuple[str, bytes] | None:
        return (HEAD, b"file") if self.num_read >= self._at else None


class Transfer:
    """Transfer of a body of ``nbytes``, whose first item decides from the byte ``at`` on."""

    def __init__(self, nbytes: int, *, at: int = 4, placement: bytes = PLACEMENT) -> None:
        self.engine, self.reader = Engine(), Reader(at)
        self.seen: list[tuple[str, bytes]] = []

        def placement_of(head: str, first: bytes) -> bytes:
            self.seen.append((head, first))
            return placement

        upstream: Any = self.engine
        self.stream = BodyStream(upstream, REQUEST, nbytes, placement_of)

    async def follow(self, chunk: bytes) -> None:
        self.reader.num_read += len(chunk)
        reader: Any = self.reader
        await self.stream.follow(reader, chunk)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(within())


def test_last_chunk_waits_for_the_end() -> None:
    async def main() -> None:
        body = ArrivingBody(6)
        taker = Taker(body)
        for chunk in (b"ab", b"", b"cd", b"ef"):
            await body.push(chunk)
        await passes()
        assert (taker.taken, taker.task.done()) == (b"abcd", False)
        body.finish()
        await taker.task
        assert taker.taken == b"abcdef"

    run(main)


@pytest.mark.parametrize("nbytes", [5, 7])
def test_body_of_another_length_is_broken_off(nbytes: int) -> None:
    async def main() -> None:
        body = ArrivingBody(nbytes)
        taker = Taker(body)
        for chunk in (b"ab", b"cdef"):
            await body.push(chunk)
        await passes()
        body.finish()
        with pytest.raises(EngineUnavailable):
            await taker.task

    run(main)


def test_body_longer_than_announced_is_broken_off_before_its_end() -> None:
    """An HTTP client cuts a body at its announced length: that would be a whole request."""

    async def main() -> None:
        body = ArrivingBody(4)
        taker = Taker(body)
        for chunk in (b"ab", b"cd", b"ef"):
            await body.push(chunk)
        with pytest.raises(EngineUnavailable):
            await taker.task
        assert len(taker.taken) < 4

    run(main)


@pytest.mark.parametrize("is_sent", [False, True])
def test_body_that_is_given_up_is_broken_off(is_sent: bool) -> None:
    async def main() -> None:
        body = ArrivingBody(4)
        taker = Taker(body)
        await body.push(b"abc")
        if is_sent:
            await body.push(b"d")
            await passes()
        body.give_up()
        with pytest.raises(EngineUnavailable):
            await taker.task
        assert taker.taken == (b"abc" if is_sent else b"")

    run(main)


def test_slow_server_makes_the_client_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_stream, "_MAX_WAITING_NBYTES", 10)

    async def main() -> None:
        body = ArrivingBody(40)
        await body.push(b"a" * 10)
        await body.push(b"b" * 10)  # ten bytes wait
        pushing = asyncio.create_task(body.push(b"c" * 10))
        await passes()
        assert not pushing.done()
        taker = Taker(body)
        await pushing
        await body.push(b"d" * 10)
        body.finish()
        await taker.task
        assert taker.taken == b"a" * 10 + b"b" * 10 + b"c" * 10 + b"d" * 10

    run(main)


def test_client_does_not_wait_for_a_server_that_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_stream, "_MAX_WAITING_NBYTES", 10)

    async def main() -> None:
        body = ArrivingBody(100)
        await body.push(b"a" * 20)
        pushing = asyncio.create_task(body.push(b"b" * 20))
        await passes()
        assert not pushing.done()
        body.give_up()
        await pushing
        await body.push(b"c" * 60)

    run(main)


def test_transfer_begins_with_the_first_item_and_ends_with_the_check() -> None:
    async def main() -> None:
        transfer = Transfer(10)
        before = STREAMED.labels("complete").values[0]
        await transfer.follow(b"abc")
        assert transfer.seen == []
        await transfer.follow(b"def")
        assert (transfer.seen, transfer.engine.placements) == ([(HEAD, b"file")], [PLACEMENT])
        await transfer.follow(b"ghij")
        await passes()
        assert transfer.engine.taker.taken == b"abcdef"
        transfer.stream.end()
        assert transfer.stream.complete(PLACEMENT) is transfer.engine.begun
        await transfer.engine.taker.task
        assert transfer.engine.taker.taken == b"abcdefghij"
        transfer.engine.on_end()  # the answer
        assert not transfer.engine.begun.is_closed
        transfer.stream.close()
        assert transfer.engine.begun.is_closed
        assert STREAMED.labels("complete").values[0] == before + 1

    run(main)


def test_body_of_another_placement_is_not_completed() -> None:
    async def main() -> None:
        transfer = Transfer(6)
        await transfer.follow(b"abcdef")
        transfer.stream.end()
        assert transfer.stream.complete(b"another") is None
        transfer.stream.close()
        with pytest.raises(EngineUnavailable):
            await transfer.engine.taker.task
        assert transfer.engine.begun.is_closed

    run(main)


def test_server_that_ends_early_is_left() -> None:
    async def main() -> None:
        transfer = Transfer(9)
        before = STREAMED.labels("given_up").values[0]
        await transfer.follow(b"abcdef")
        transfer.engine.on_end()
        assert transfer.engine.begun.is_closed
        await transfer.follow(b"ghi")
        transfer.stream.end()
        assert transfer.stream.complete(PLACEMENT) is None
        assert STREAMED.labels("given_up").values[0] == before + 1

    run(main)


def test_request_that_waits_after_its_body_leaves_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body_stream, "_GRACE_S", 0.0)

    async def main() -> None:
        transfer = Transfer(6)
        await transfer.follow(b"abcdef")
        transfer.stream.end()
        with pytest.raises(EngineUnavailable):
            await transfer.engine.taker.task
        assert transfer.engine.begun.is_closed
        assert transfer.stream.complete(PLACEMENT) is None

    run(main)


def test_complete_body_is_not_given_up_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_stream, "_GRACE_S", 0.0)

    async def main() -> None:
        transfer = Transfer(6)
        await transfer.follow(b"abcdef")
        transfer.stream.end()
        assert transfer.stream.complete(PLACEMENT) is not None
        await passes()  # past the timer, if it still ran
        await transfer.engine.taker.task
        assert not transfer.engine.begun.is_closed

    run(main)


def test_without_a_server_or_a_placement_nothing_is_sent() -> None:
    async def main() -> None:
        for transfer in (Transfer(9), Transfer(9, placement=b"")):
            transfer.engine.is_running = False
            for chunk in (b"abcdef", b"ghi"):
                await transfer.follow(chunk)
            transfer.stream.end()
            assert transfer.stream.complete(PLACEMENT) is None
            assert len(transfer.seen) == 1
            transfer.stream.close()

    run(main)


def test_long_beginning_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_stream, "_MAX_EARLY_NBYTES", 10)

    async def main() -> None:
        transfer = Transfer(40, at=25)
        for _ in range(4):
            await transfer.follow(b"a" * 10)
        assert transfer.seen == []
        assert transfer.stream.complete(PLACEMENT) is None

    run(main)
