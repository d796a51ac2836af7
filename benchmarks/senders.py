"""Send prepared requests from several processes, each on a core of its own."""

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

from benchmarks.client import Client, clients

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
            number = -(-num_clients // len(cores))
            tasks = [pool.submit(_send, url, part, number) for part in parts]
            found = [task.result() for task in tasks]
            begin_s = min(begin_s for begin_s, _, _ in found)
            return Took(
                max(end_s for _, end_s, _ in found) - begin_s, sum(cpu for *_, cpu in found)
            )

        yield send


def _begin(barrier: Barrier, waiting: Any) -> None:
    os.sched_setaffinity(0, {waiting.get()})
    _of_process["barrier"] = barrier


def _send(url: str, bodies: Sequence[bytes], number: int) -> tuple[float, float, float]:
    """Return the times of begin and end, and the processor time between them, in seconds."""
    _of_process["barrier"].wait(_LONGEST_WAIT_S)  # the requests have come to all processes
    begin_s, cpu_s = time.monotonic(), time.process_time()
    asyncio.run(_send_all(url, bodies, number))
    return begin_s, time.monotonic(), time.process_time() - cpu_s


async def _send_all(url: str, bodies: Sequence[bytes], number: int) -> None:
    waiting = iter(bodies)

    async def work(client: Client) -> None:
        for body in waiting:
            await client.post(body)

    async with clients(url, number) as opened:
        await asyncio.gather(*map(work, opened))
