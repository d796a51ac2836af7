"""Measure how long an honest client waits while twenty others send expensive requests.

The server has the built-in model and runs on two cores. The honest client sends a new image of 1 MB
once a second, whether the previous image is answered or not. Its times are measured beside

- twenty clients that do the same (open loop);
- twenty clients that send the next image when the previous one is answered (closed loop);
- twenty clients of each kind of `benchmarks.attackers`.

Each case of each round has a server of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import httpx2 as httpx

from benchmarks.attackers import (
    ALL,
    CLOSED,
    CROWD,
    HOSTED,
    KINDS,
    NUM,
    OPEN,
    body_of,
    new_photo,
)
from benchmarks.children import command, free_port, wait_until_it_answers
from benchmarks.record import BusyMeter, Goal, Report, Row

QUESTION = "How long does an honest client wait while others send expensive requests?"
COLUMNS = ("beside", "p50_ms", "p95_ms", "p99_ms", "failed")

_START_TIMEOUT_S, _TIMEOUT_S = 120.0, 60.0
_SETTLE_S = 5.0
_ARENA = "512MiB"
_MOST_CLOSED: Final = 3.0
_MOST_OPEN: Final = 3.5
_MOST_OPEN_OF: Final = {
    "8 answers, read": 45.6,
    "8 answers, unread": 8.25,
    "128 images": 5.75,
    "8 photos": 6.4,
    "schema bombs": 3.15,
}
"""Half of the result of an external study at 9fa271e, where that was above 6."""

AfterSample = Callable[[], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kind",
        action="append",
        choices=(*KINDS, *HOSTED, ALL),
        help="other clients of this kind only; may be repeated",
    )
    parser.add_argument("--rounds", type=int, help="how often each case is measured (3)")
    parser.add_argument("--requests", type=int, help="of the honest client, in each case (100)")


def _cases(kinds: list[str] | None) -> list[str]:
    chosen = kinds or [*KINDS, *HOSTED]
    return [OPEN, CLOSED, *([CROWD] if ALL in chosen else []), *chosen]


def num_steps(
    *, quick: bool, kind: list[str] | None, rounds: int | None, requests: int | None
) -> int:
    return len(_cases(kind)) * _num_rounds(rounds, quick=quick)


def _num_rounds(rounds: int | None, *, quick: bool) -> int:
    return rounds or (1 if quick else 3)


def run(
    *,
    quick: bool,
    kind: list[str] | None,
    rounds: int | None,
    requests: int | None,
    after_sample: AfterSample,
) -> Report:
    report, meter = Report("attack", QUESTION), BusyMeter()
    cases, number = _cases(kind), requests or (10 if quick else 100)
    report.rows = [Row({"beside": case}, {name: [] for name in COLUMNS[1:]}) for case in cases]
    for _ in range(_num_rounds(rounds, quick=quick)):
        for case, row in zip(cases, report.rows, strict=True):
            host_port = free_port()
            # Make the bodies before the others begin, as this takes seconds of the same two cores.
            bodies = [body_of([("jpeg", new_photo())], max_tokens=16) for _ in range(number)]
            with _server(host_port) as url, _beside(case, url, host_port):
                for name, value in asyncio.run(_measure(url, bodies)).items():
                    row.samples[name].append(value)
            after_sample()
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.goals = list(_goals(report.rows))
    report.notes.append(
        f"{number} requests of the honest client a case; {NUM} others, of all kinds together "
        f"{NUM * len(KINDS)}; each case has its own server"
    )
    return report


async def _measure(url: str, bodies: list[bytes]) -> dict[str, float]:
    number = len(bodies)
    async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:

        async def ask(body: bytes) -> tuple[float, bool]:
            start_s = time.monotonic()
            try:
                answer = await client.post(f"{url}/v1/chat/completions", content=body)
                is_good = answer.is_success
            except httpx.HTTPError:
                is_good = False
            return time.monotonic() - start_s, is_good

        async with asyncio.TaskGroup() as tasks:
            asked = []
            for body in bodies:
                asked.append(tasks.create_task(ask(body)))
                await asyncio.sleep(1.0)
    ordered = sorted(each.result()[0] for each in asked)
    return {
        "p50_ms": statistics.median(ordered) * 1e3,
        "p95_ms": ordered[min(number - 1, int(number * 0.95))] * 1e3,
        "p99_ms": ordered[min(number - 1, int(number * 0.99))] * 1e3,
        "failed": float(sum(not each.result()[1] for each in asked)),
    }


def _goals(rows: list[Row]) -> Iterator[Goal]:
    by_case = {row.keys["beside"]: row for row in rows}
    for case, row in by_case.items():
        if case in (OPEN, CLOSED, CROWD):
            continue
        p95_ms = row.median("p95_ms")
        closed = CROWD if case == ALL else CLOSED
        ratio = p95_ms / by_case[closed].median("p95_ms")
        yield Goal(
            f"{case}: p95_ms / beside {closed} <= {_MOST_CLOSED:g}", ratio <= _MOST_CLOSED, ratio
        )
        if case != ALL:
            most = _MOST_OPEN_OF.get(case, _MOST_OPEN)
            ratio = p95_ms / by_case[OPEN].median("p95_ms")
            yield Goal(f"{case}: p95_ms / beside {OPEN} <= {most:g}", ratio <= most, ratio)


@contextmanager
def _server(host_port: int) -> Iterator[str]:
    port = free_port()
    line = [sys.executable, "-m", "afferent.cli", "serve", "shapes", "--port", str(port)]
    line += ["--arena-nbytes", _ARENA, "--fetch-allow", f"127.0.0.1:{host_port}"]
    with _quiet(line) as popen:
        url = f"http://127.0.0.1:{port}"
        log = f"try {shlex.join(line)}"
        wait_until_it_answers(popen, f"{url}/ready", timeout_s=_START_TIMEOUT_S, log=log)
        yield url


@contextmanager
def _beside(case: str, url: str, host_port: int) -> Iterator[None]:
    line = [sys.executable, "-m", "benchmarks.attackers", case, url, str(host_port)]
    with _quiet(line, stdout=subprocess.PIPE) as popen:
        if popen.stdout is None or not popen.stdout.readline():
            raise RuntimeError(f"the {case} did not start")
        time.sleep(_SETTLE_S)
        yield


_quiet = functools.partial(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
