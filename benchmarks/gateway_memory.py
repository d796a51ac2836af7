"""Memory of a gateway while 500 bodies of 5 MB are on their way to replicas that do not answer.

Each client sends a body and waits. The replicas read everything that they get, and answer when
nothing has moved for some seconds. Growth is that of the private memory of all processes of the
gateway, and of its arena, in which it keeps copies of bodies within the share for raw media.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, Final

from afferent.store.state.region import DEFAULT_SHARES
from afferent.types import MiB, ObjectKind
from benchmarks.gate_memory import anonymous_nbytes, pss_nbytes, trees
from benchmarks.gateway import Gateway, afferent, bodies_of
from benchmarks.record import BusyMeter, Goal, Report, Row

QUESTION = "How much memory does a gateway take for 500 bodies on their way?"
COLUMNS = ("bodies", "private_mib", "arena_mib", "sent", "received", "ok")
_NUM_BODIES: Final = 500
_NUM_REPLICAS: Final = 4
_ARENA_NBYTES: Final = 256 * MiB
_MOST_MIB: Final = 64
_STILL_S: Final = 3.0
_PIECE: Final = 1 << 17
_LENGTH: Final = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")
_ANSWER: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def num_steps(*, quick: bool) -> int:
    return 1


def run(*, quick: bool, after_sample: Callable[[], None]) -> Report:
    report, meter = Report("gateway-memory", QUESTION), BusyMeter()
    number = _NUM_BODIES // 25 if quick else _NUM_BODIES
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def do(what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, loop).result()

    replicas = _Replicas()
    try:
        with afferent(do(replicas.start())) as gateway:
            report.rows.append(_measure(gateway, replicas, number, do))
        after_sample()
    finally:
        do(replicas.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    (row,) = report.rows
    share_mib = _ARENA_NBYTES * DEFAULT_SHARES[ObjectKind.RAW] / MiB
    grown_mib = row.median("private_mib") + row.median("arena_mib")
    report.goals = [
        Goal(
            f"growth at most the share for raw media ({share_mib:g} MiB) + {_MOST_MIB} MiB",
            grown_mib <= share_mib + _MOST_MIB,
            grown_mib,
        ),
        Goal("every body is answered", row.median("ok") == number, row.median("ok")),
    ]
    return report


def _measure(gateway: Gateway, replicas: _Replicas, number: int, do: Callable[[Any], Any]) -> Row:
    clients = _Clients(gateway.url)
    (body,) = bodies_of("image", 1)
    root = gateway.process.pid
    before, arena_before = anonymous_nbytes([root]), _shared_nbytes(root)
    replicas.hold()
    clients.begin(body, number, do)
    most, still_since_s, seen = 0, time.monotonic(), (-1, -1)
    while time.monotonic() - still_since_s < _STILL_S:
        time.sleep(0.05)
        most = max(most, anonymous_nbytes([root]))
        if (now := (clients.num_sent, replicas.num_received)) != seen:
            seen, still_since_s = now, time.monotonic()
    arena = _shared_nbytes(root)
    replicas.release()
    statuses: Counter[int] = do(clients.end())
    return Row(
        {"bodies": number},
        {
            "private_mib": [(most - before) / MiB],
            "arena_mib": [(arena - arena_before) / MiB],
            "sent": [seen[0] / MiB],
            "received": [seen[1] / MiB],
            "ok": [statuses[200]],
        },
    )


def _shared_nbytes(root: int) -> float:
    return sum(pss_nbytes(pid)[1] for pid in trees([root]))


class _Replicas:
    """Servers that read bodies, and answer them at once or when they are released."""

    def __init__(self) -> None:
        self.num_received = 0
        self._servers: list[asyncio.Server] = []

    async def start(self) -> list[str]:
        self._may_answer = asyncio.Event()
        self._may_answer.set()
        self._loop = asyncio.get_running_loop()
        self._servers = [
            await asyncio.start_server(self._serve, "127.0.0.1", 0) for _ in range(_NUM_REPLICAS)
        ]
        return [f"http://127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in self._servers]

    def hold(self) -> None:
        self.num_received = 0
        self._loop.call_soon_threadsafe(self._may_answer.clear)

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self._may_answer.set)

    async def close(self) -> None:
        for server in self._servers:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = _LENGTH.search(head)
                left = int(length[1]) if length else 0
                is_body = left > 0
                while left > 0:
                    data = await reader.read(min(left, 1 << 18))
                    left -= len(data)
                    self.num_received += len(data)
                if is_body:
                    await self._may_answer.wait()
                writer.write(_ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


class _Clients:
    """Clients with a connection for each body."""

    def __init__(self, url: str) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self.num_sent = 0
        self._tasks: list[asyncio.Task[int]] = []

    def begin(self, body: bytes, number: int, do: Callable[[Any], Any]) -> None:
        async def begin() -> None:
            self._tasks = [asyncio.create_task(self._ask(body, index)) for index in range(number)]

        self.num_sent = 0
        do(begin())

    async def end(self) -> Counter[int]:
        return Counter(await asyncio.gather(*self._tasks))

    async def _ask(self, body: bytes, index: int) -> int:
        """Send a body with an image of its own, and return the status of the answer."""
        middle, view = len(body) // 2, memoryview(body)
        first, second = view[:middle], view[middle:]
        pieces: list[bytes | memoryview] = []
        for half in (first, second):
            pieces += [half[start : start + _PIECE] for start in range(0, len(half), _PIECE)]
            pieces += [b"%08d" % index] if half is first else []
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            length = sum(map(len, pieces))
            head += f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
            writer.write(head.encode())
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                self.num_sent += len(piece)
            return int((await reader.readuntil(b"\r\n")).split()[1])
        finally:
            writer.close()
