"""Measure the answers of ``/health``, ``/ready`` and ``/metrics`` with 256 open connections.

The server has the built-in model and one frontend, on the same two cores as the clients. There are
three cases for each path:

- connections that stay open and send 200 requests a second in all;
- the same beside 140 clients that send new images;
- connections that repeat the request as soon as it is answered, so that 256 are always waiting.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Final
from urllib.parse import urlsplit

from benchmarks.attackers import CROWD
from benchmarks.before import ROOT, server_of
from benchmarks.children import command
from benchmarks.record import BusyMeter, Goal, Report, Row

QUESTION = "How soon do probes answer at 256 connections?"
COLUMNS = ("case", "path", "per_s", "p50_ms", "p99_ms", "longest_ms")

_NUM: Final = 256
_PATHS = ("/health", "/ready", "/metrics")
_OPEN, _BESIDE, _ALL = "kept open", "beside new images", "all at once"
_CASES = (_OPEN, _BESIDE, _ALL)
_PER_S = 200.0
_SETTLE_S = 5.0
_MOST_MS = 20.0

AfterSample = Callable[[], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", choices=_CASES, help="only this one")


def _cases(case: str | None) -> tuple[str, ...]:
    return (case,) if case else _CASES


def num_steps(*, quick: bool, case: str | None) -> int:
    return len(_cases(case)) * len(_PATHS)


def run(*, quick: bool, case: str | None, after_sample: AfterSample) -> Report:
    report, meter = Report("probes", QUESTION), BusyMeter()
    for each in _cases(case):
        with server_of(ROOT, "--frontends", "1") as side, _beside(each, side.url):
            for path in _PATHS:
                seconds, took_s = asyncio.run(_ask(side.url, each, path, 1.0 if quick else 15.0))
                report.rows.append(_row(each, path, seconds, took_s))
                after_sample()
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.goals = list(_goals(report.rows))
    return report


def _row(case: str, path: str, seconds: list[float], took_s: float) -> Row:
    ordered = sorted(seconds)
    values = {
        "per_s": len(ordered) / took_s,
        "p50_ms": statistics.median(ordered) * 1e3,
        "p99_ms": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3,
        "longest_ms": ordered[-1] * 1e3,
    }
    return Row({"case": case, "path": path}, {name: [value] for name, value in values.items()})


def _goals(rows: list[Row]) -> Iterator[Goal]:
    for row in rows:
        value = row.median("p99_ms")
        what = f"{row.keys['path']}, {row.keys['case']}: p99_ms <= {_MOST_MS:g}"
        yield Goal(what, value <= _MOST_MS, value)


@contextmanager
def _beside(case: str, url: str) -> Iterator[None]:
    if case != _BESIDE:
        yield
        return
    line = [sys.executable, "-m", "benchmarks.attackers", CROWD, url, "0"]
    with command(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as popen:
        if popen.stdout is None or not popen.stdout.readline():
            raise RuntimeError("the clients did not start")
        time.sleep(_SETTLE_S)
        yield


async def _ask(url: str, case: str, path: str, for_s: float) -> tuple[list[float], float]:
    """Return the seconds of each answer, and the seconds of all together."""
    where = urlsplit(url)
    request = f"GET {path} HTTP/1.1\r\nhost: {where.netloc}\r\n\r\n".encode()
    seconds: list[float] = []
    async with AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(_connection(where.hostname, where.port))
            for _ in range(_NUM)
        ]

        async def ask_again(number: int, every_s: float) -> None:
            """Send requests at an interval on one connection; connections start one by one."""
            next_s = start_s + every_s * number / _NUM
            while next_s < start_s + for_s:
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                asked_s = time.monotonic()
                await _answer(*connections[number], request)
                seconds.append(time.monotonic() - asked_s)
                next_s = max(next_s + every_s, time.monotonic())

        await asyncio.gather(*(_answer(*each, request) for each in connections))
        start_s = time.monotonic()
        every_s = 0.0 if case == _ALL else _NUM / _PER_S
        await asyncio.gather(*(ask_again(number, every_s) for number in range(_NUM)))
        return seconds, time.monotonic() - start_s


async def _answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> None:
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = head.partition(b"content-length:")[2].partition(b"\r\n")[0]
    await reader.readexactly(int(length))
    if not head.startswith(b"http/1.1 200"):
        raise RuntimeError(f"a probe was answered {head.splitlines()[0].decode()!r}")


@asynccontextmanager
async def _connection(
    host: str | None, port: int | None
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        yield reader, writer
    finally:
        writer.close()
