"""HTTP client of a few lines, for prepared requests.

With a client library, sending a request would take as much processor time as answering it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, Self
from urllib.parse import urlsplit

_BUFFER_NBYTES: Final = 1 << 20


class Client:
    """Connection that sends one request after the other, and discards the answers."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> None:
        self._reader, self._writer, self._head = reader, writer, head

    @classmethod
    async def open(cls, url: str, *, uds: str | None = None) -> Self:
        """Connect to the server of a URL, or to the one behind a socket."""
        where = urlsplit(url)
        if uds is None:
            opened = await asyncio.open_connection(where.hostname, where.port, limit=_BUFFER_NBYTES)
        else:
            opened = await asyncio.open_unix_connection(uds, limit=_BUFFER_NBYTES)
        target = where.path + (f"?{where.query}" if where.query else "")
        head = f"POST {target} HTTP/1.1\r\nhost: {where.netloc}\r\n"
        return cls(*opened, f"{head}content-type: application/json\r\ncontent-length: ".encode())

    async def post(self, body: bytes) -> None:
        """Send a request, and read the answer to its end.

        Raises:
            RuntimeError: It is not 200.
        """
        self._writer.writelines((self._head, b"%d\r\n\r\n" % len(body), body))
        await self._writer.drain()
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        first, *lines = head[:-4].split(b"\r\n")
        fields = dict(line.split(b": ", 1) for line in lines)
        said = b""
        if (length := fields.get(b"content-length")) is not None:
            said = await self._skip(int(length))
        elif fields.get(b"transfer-encoding") == b"chunked":
            while nbytes := int((await self._reader.readline()).split(b";")[0], 16):
                said = await self._skip(nbytes)
                await self._reader.readline()
            while (await self._reader.readline()).strip():  # fields behind the body
                pass
        else:
            raise RuntimeError(f"an answer without a length: {first!r}")
        if first.split(b" ", 2)[1] != b"200":
            raise RuntimeError(f"a request was answered with {first!r} {said!r}")

    async def _skip(self, nbytes: int) -> bytes:
        """Discard so many bytes; return some of the first."""
        first = b""
        while nbytes:
            data = await self._reader.read(min(nbytes, _BUFFER_NBYTES))
            if not data:
                raise RuntimeError("an answer has no end")
            first = first or data[:300]
            nbytes -= len(data)
        return first

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def clients(
    url: str, number: int, *, uds: str | None = None
) -> AsyncIterator[Sequence[Client]]:
    """Yield so many connected clients of a URL."""
    async with AsyncExitStack() as stack:
        opened = []
        for _ in range(number):
            opened.append(await Client.open(url, uds=uds))
            stack.callback(opened[-1].close)
        yield opened
