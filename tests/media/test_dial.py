"""The header of an HTTP answer is read in small steps, up to a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpcore
import pytest

from afferent.errors import FetchFailed
from afferent.media.fetch.dial import BoundedStream

STEP_NBYTES = 4 << 10
HEADER_NBYTES = 128 << 10


class Endless(httpcore.AsyncNetworkStream):
    """A stream without an end."""

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        return b"x" * max_bytes

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        pass


def with_stream(use: Callable[[BoundedStream], Awaitable[None]]) -> None:
    async def main() -> None:
        await use(BoundedStream(Endless()))

    asyncio.run(main())


async def read_header(stream: BoundedStream, nbytes: int) -> None:
    while nbytes > 0:
        data = await stream.read(1 << 16)
        assert len(data) == STEP_NBYTES
        nbytes -= len(data)


def test_a_header_comes_in_small_steps_and_a_body_does_not() -> None:
    async def use(stream: BoundedStream) -> None:
        await read_header(stream, HEADER_NBYTES)
        stream.end_header()
        assert len(await stream.read(1 << 20)) == 1 << 20

    with_stream(use)


def test_a_header_has_an_end() -> None:
    async def use(stream: BoundedStream) -> None:
        await read_header(stream, HEADER_NBYTES)
        with pytest.raises(FetchFailed, match="too long"):
            await stream.read(1)

    with_stream(use)


def test_each_answer_of_a_connection_has_a_header_of_its_own() -> None:
    async def use(stream: BoundedStream) -> None:
        await stream.write(b"GET / HTTP/1.1\r\n\r\n")
        await read_header(stream, HEADER_NBYTES)
        stream.end_header()
        await stream.read(1 << 20)
        await stream.write(b"GET / HTTP/1.1\r\n\r\n")
        await read_header(stream, HEADER_NBYTES)
        with pytest.raises(FetchFailed, match="too long"):
            await stream.read(1)

    with_stream(use)
