"""Send prepared requests from several processes, each on a core of its own.

The client is a few lines: with a client library, sending a request would take as much processor
time as answering it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from typing import Any, Final
from urllib.parse import urlsplit

_LENGTH: Final = b"content-length:"
_LONGEST_WAIT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds from the first request to the last answer, and of processor time of all senders."""

    wall_s: float
    cpu_s: float


Send = Callable[[str, Sequence[bytes], int], Took]
"""Sends all bodies to a URL from a number of clients, each of which waits for its answer."""

_of_process: dict[str, Barrier] = {}


@contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[Send]:
    """Run a process on each core; the yielded function has them send requests.

    It raises:
        RuntimeError: An answer is not 200.
    """
    context = multiprocessing.get_context("spawn")
    barrier, waiting = context.Barrier(len(cores)), context.SimpleQueue()
    for core in cores:
        waiting.put(core)
    with ProcessPoolExecutor(len(cores), context, _begin, (barrier, waiting)) as pool:

        def send(url: str, bodies: Sequence[bytes], num_clients: int) -> Took:
            parts = [bodies[number :: len(cores)] for number in range(len(cores))]
            clients = -(-num_clients // len(cores))
            tasks = [pool.submit(_send, url, part, clients) for part in parts]
            found = [task.result() for task in tasks]
            begin_s = min(begin_s for begin_s, _, _ in found)
            return Took(
                max(end_s for _, end_s, _ in found) - begin_s, sum(cpu for *_, cpu in found)
            )

        yield send


def _begin(barrier: Barrier, waiting: Any) -> None:
    os.sched_setaffinity(0, {waiting.get()})
    _of_process["barrier"] = barrier


def _send(url: str, bodies: Sequence[bytes], clients: int) -> tuple[float, float, float]:
    """Return the times of begin and end, and the processor time between them, in seconds."""
    _of_process["barrier"].wait(_LONGEST_WAIT_S)  # the requests have come to all processes
    begin_s, cpu_s = time.monotonic(), time.process_time()
    asyncio.run(_send_all(url, bodies, clients))
    return begin_s, time.monotonic(), time.process_time() - cpu_s


async def _send_all(url: str, bodies: Sequence[bytes], clients: int) -> None:
    where = urlsplit(url)
    target = where.path + (f"?{where.query}" if where.query else "")
    head = (
        f"POST {target} HTTP/1.1\r\nhost: {where.netloc}\r\n"
        "content-type: application/json\r\ncontent-length: "
    ).encode()
    waiting = iter(bodies)

    async def work() -> None:
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        try:
            for body in waiting:
                writer.writelines((head, b"%d\r\n\r\n" % len(body), body))
                await writer.drain()
                await _read(reader)
        finally:
            writer.close()

    await asyncio.gather(*(work() for _ in range(clients)))


async def _read(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    lengths = [each for each in head.split(b"\r\n") if each.startswith(_LENGTH)]
    said = await reader.readexactly(int(lengths[0][len(_LENGTH) :])) if lengths else b""
    if head.split(b" ", 2)[1] != b"200" or not lengths:
        raise RuntimeError(f"a request was answered with {head[:200]!r} {said[:300]!r}")
