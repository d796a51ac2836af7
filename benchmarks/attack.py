"""How long does an honest client wait while twenty others mean no good?

A server with the built-in model on two cores. One client sends an image that nobody has seen, and
the next when it is answered; its times are measured alone, beside twenty that do the same, and
beside twenty attackers of each kind (`benchmarks.attackers`): one kind at a time, and all together,
which is judged by what it is beside as many honest ones.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx2 as httpx

from benchmarks.attackers import ALL, CROWD, DRIPPING, HONEST, KINDS, NUM, body_of, small_image
from benchmarks.children import command, free_port, wait_until_it_answers
from benchmarks.record import BusyMeter, Goal, Report, Row

QUESTION = "How long does an honest client wait while others mean no good?"
COLUMNS = ("beside", "requests_per_s", "p50_ms", "p99_ms", "failed")

_ALONE = "nobody"
_START_TIMEOUT_S, _TIMEOUT_S = 120.0, 60.0
_SETTLE_S = 5.0
_ARENA = "512MiB"

AfterSample = Callable[[], None]
_seeds = itertools.count(50_000_000)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kind", choices=(*KINDS, DRIPPING, ALL), help="attackers of this kind only"
    )


def _cases(kind: str | None) -> list[str]:
    kinds = [each for each in (*KINDS, DRIPPING, ALL) if each != HONEST]
    chosen = [kind] if kind and kind != HONEST else kinds
    return [_ALONE, HONEST, *([CROWD] if ALL in chosen else []), *chosen]


def num_steps(*, quick: bool, kind: str | None) -> int:
    return len(_cases(kind))


def run(*, quick: bool, kind: str | None, after_sample: AfterSample) -> Report:
    report, meter = Report("attack", QUESTION), BusyMeter()
    for case in _cases(kind):
        drip_port = free_port()
        with _server(drip_port) as url, _beside(case, url, drip_port):
            report.rows.append(_measure(url, case, 8.0 if quick else 25.0))
        after_sample()
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.goals = list(_goals(report.rows))
    of_all = NUM * len(KINDS)
    report.notes.append(f"{NUM} others at a time, {of_all} of all; each case has its own server")
    return report


def _measure(url: str, case: str, for_s: float) -> Row:
    seconds: list[float] = []
    num_failed = 0
    with httpx.Client(timeout=_TIMEOUT_S) as client:
        begin_s = time.monotonic()
        while time.monotonic() - begin_s < for_s:
            body = body_of([("png", small_image(next(_seeds)))])
            start_s = time.monotonic()
            try:
                is_good = client.post(f"{url}/v1/chat/completions", content=body).is_success
            except httpx.HTTPError:
                is_good = False
            num_failed += not is_good
            seconds.append(time.monotonic() - start_s)
        took_s = time.monotonic() - begin_s
    ordered = sorted(seconds)
    samples = {
        "requests_per_s": (len(seconds) - num_failed) / took_s,
        "p50_ms": statistics.median(ordered) * 1e3,
        "p99_ms": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3,
        "failed": float(num_failed),
    }
    return Row({"beside": case}, {name: [value] for name, value in samples.items()})


def _goals(rows: list[Row]) -> Iterator[Goal]:
    by_case = {row.keys["beside"]: row for row in rows}
    for case, row in by_case.items():
        if case in (_ALONE, HONEST, CROWD):
            continue
        shared = by_case[CROWD if case == ALL else HONEST]
        ratio = row.median("p99_ms") / shared.median("p99_ms")
        yield Goal(f"{case}: p99_ms / beside honest ones <= 3", ratio <= 3, ratio)
        ratio = row.median("requests_per_s") / shared.median("requests_per_s")
        yield Goal(f"{case}: requests_per_s / beside honest ones >= 0.5", ratio >= 0.5, ratio)


@contextmanager
def _server(drip_port: int) -> Iterator[str]:
    port = free_port()
    line = [sys.executable, "-m", "afferent.cli", "serve", "shapes", "--port", str(port)]
    line += ["--arena-nbytes", _ARENA, "--fetch-allow", f"127.0.0.1:{drip_port}"]
    with _quiet(line) as popen:
        url = f"http://127.0.0.1:{port}"
        log = f"try {shlex.join(line)}"
        wait_until_it_answers(popen, f"{url}/ready", timeout_s=_START_TIMEOUT_S, log=log)
        yield url


@contextmanager
def _beside(case: str, url: str, drip_port: int) -> Iterator[None]:
    if case == _ALONE:
        yield
        return
    line = [sys.executable, "-m", "benchmarks.attackers", case, url, str(drip_port)]
    with _quiet(line, stdout=subprocess.PIPE) as popen:
        if popen.stdout is None or not popen.stdout.readline():
            raise RuntimeError(f"the {case} did not start")
        time.sleep(_SETTLE_S)
        yield


_quiet = functools.partial(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
