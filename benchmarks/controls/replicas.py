"""Servers that read a body and answer with their number: what is behind gateways.

python -m benchmarks.controls.replicas NUMBER      (prints their ports)
"""

from __future__ import annotations

import asyncio
import re
import sys
from functools import partial
from typing import Final, cast

import uvloop

_LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_END: Final = b"\r\n\r\n"


class _Replica(asyncio.Protocol):
    def __init__(self, index: int) -> None:
        body = (
            b'{"object":"list","data":[{"id":"m","object":"model"}],"choices":[],"replica":%d}'
            % index
        )
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._answer = head % len(body) + body
        self._head, self._left = b"", -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._left < 0:
            self._head += data
            if _END not in self._head:
                return
            head, _, rest = self._head.partition(_END)
            length = _LENGTH.search(head)
            self._left, self._head = int(length[1]) if length else 0, b""
            data = rest
        self._left -= len(data)
        if self._left <= 0:
            self._left = -1
            self._transport.write(self._answer)


async def _serve(number: int) -> None:
    loop = asyncio.get_running_loop()
    ports = []
    for index in range(number):
        server = await loop.create_server(partial(_Replica, index), "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
    print(*ports, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(int(sys.argv[1])))
