"""What do images cost in front of vLLM, and behind its own API server?

Two servers with the same model, which run at the same time and work in turn: Afferent with a vLLM
of its own, and a stock ``vllm serve``, or one with the settings that suit it best (``--against
best``: two API servers, the processor cache in shared memory). Pages of 1275 x 1650 as PNG, one
token of answer. The engine (core and worker) computes on the same two cores, so it bounds the
misses; what is compared is the processor time of all other processes, and memory.

It needs an environment with vLLM (``make setup-vllm``), and takes some twenty minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx

from afferent.errors import ConfigError
from benchmarks import vllm_servers
from benchmarks.pages import PageFiles
from benchmarks.record import BusyMeter, Goal, Report, Row
from benchmarks.vllm_servers import MODEL, Side
from tools import vllm_env

QUESTION = "What do images cost in front of vLLM, and behind its own API server?"
COLUMNS = ("side", "case", "c", "requests_per_s", "p50_ms", "p99_ms", "cpu_ms", "engine_cpu_ms")

_CASES = (
    ("misses", 1),
    ("misses", 16),
    ("misses", 64),
    ("repeats", 1),
    ("repeats", 16),
    ("repeats", 64),
)
_NUM_REQUESTS = {1: 8, 16: 32, 64: 64}
_NUM_REPEATS = 64
_FIRST_REPEATS = ("repeats", 1)
_NUM_KNOWN = 16
_TIMEOUT_S = 300.0
_NUM_TEXT, _NUM_PAIRS = 200, 7

AfterSample = Callable[[], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against", choices=("stock", "best"), default="stock", help="vLLM's settings"
    )
    parser.add_argument(
        "--python", type=Path, default=vllm_env.python_of(vllm_env.FOLDER), help="with vLLM"
    )


def num_steps(*, quick: bool, python: Path, against: str) -> int:
    return len(_CASES) * 2 * _num_rounds(quick=quick) + 2 * _NUM_PAIRS


def _num_rounds(*, quick: bool) -> int:
    return 1 if quick else 7


@dataclass(slots=True)
class _Load:
    """What one side took for a number of requests."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms: float
    engine_cpu_ms: float


def run(*, quick: bool, python: Path, against: str, after_sample: AfterSample) -> Report:
    if not python.exists():
        raise ConfigError(f"{python} is not there: make setup-vllm")
    report = Report("vllm", QUESTION)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = vllm_servers.make_model(Path(folder))
        sides = [
            stack.enter_context(
                vllm_servers.stock(
                    against, python, model, *(vllm_servers.BEST if against == "best" else ())
                )
            ),
            stack.enter_context(vllm_servers.afferent(python, model)),
        ]
        pages = _Pages()
        known = pages.fresh(_NUM_KNOWN)
        for side in sides:
            _load(side, [*pages.fresh(2), *known], 4)
        base = {side.name: side.memory() for side in sides}
        meter = BusyMeter()
        for case, c in _CASES:
            if (case, c) == _FIRST_REPEATS:  # the misses may be all that is kept now
                for side in sides:
                    _load(side, known, 4)
            loads: dict[str, list[_Load]] = {side.name: [] for side in sides}
            for _ in range(_num_rounds(quick=quick)):
                for side in sides:
                    bodies = (
                        pages.fresh(_NUM_REQUESTS[c])
                        if case == "misses"
                        else list(itertools.islice(itertools.cycle(known), _NUM_REPEATS))
                    )
                    loads[side.name].append(_load(side, bodies, c))
                    after_sample()
            report.rows += [_row(side, case, c, loads[side.name]) for side in sides]
        for side in sides:
            memory = side.memory()
            report.notes.append(
                f"{side.name}: {memory.outside / 1e6:,.0f} MB outside of the worker at the end, "
                f"arena included ({base[side.name].outside / 1e6:,.0f} before), the worker "
                f"{memory.worker / 1e6:,.0f} ({base[side.name].worker / 1e6:,.0f} before)"
            )
        memories = {side.name: side.memory() for side in sides}
        pairs = _text_pairs(sides[-1], after_sample)
        report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.rows += pairs
    report.goals = [
        *_goals(report.rows, against),
        *_memory_goals(memories, against),
        *_text_goals(pairs),
    ]
    return report


class _Pages:
    """Bodies of requests, each with a page that nobody has seen."""

    def __init__(self) -> None:
        self._files, self._next = PageFiles(1275, 1650), itertools.count()

    def fresh(self, number: int) -> list[bytes]:
        return [_body(self._files.page(next(self._next))) for _ in range(number)]


def _body(png: bytes) -> bytes:
    url = "data:image/png;base64," + base64.b64encode(png).decode()
    part = f'{{"type":"image_url","image_url":{{"url":"{url}"}}}}'
    return (
        f'{{"model":"{MODEL}","max_tokens":1,"temperature":0,"messages":[{{"role":"user","content":'
        f'[{part},{{"type":"text","text":"What is this?"}}]}}]}}'
    ).encode()


def _load(side: Side, bodies: Sequence[bytes], c: int, *, uds: str | None = None) -> _Load:
    """
    Args:
        uds: Of the vLLM behind it, to go there straight.
    """
    outside, engine = side.cpu_s()
    start_s = time.monotonic()
    url = "http://vllm" if uds else side.url
    ordered = sorted(asyncio.run(_post_all(url, "/v1/chat/completions", bodies, c, uds=uds)))
    took_s = time.monotonic() - start_s
    outside_now, engine_now = side.cpu_s()
    return _Load(
        requests_per_s=len(bodies) / took_s,
        p50_ms=statistics.median(ordered) * 1e3,
        p99_ms=ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1e3,
        cpu_ms=(outside_now - outside) / len(bodies) * 1e3,
        engine_cpu_ms=(engine_now - engine) / len(bodies) * 1e3,
    )


async def _post_all(
    url: str, path: str, bodies: Sequence[bytes], c: int, *, uds: str | None
) -> list[float]:
    """Seconds of each request."""
    waiting: Iterator[bytes] = iter(bodies)
    seconds: list[float] = []
    transport = httpx.AsyncHTTPTransport(uds=uds, limits=httpx.Limits(max_connections=c))
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(
        transport=transport, timeout=_TIMEOUT_S, headers=headers
    ) as client:

        async def work() -> None:
            for body in waiting:
                start_s = time.monotonic()
                answer = await client.post(url + path, content=body)
                if answer.status_code != 200:
                    raise RuntimeError(f"{url} answered {answer.status_code}: {answer.text[:300]}")
                seconds.append(time.monotonic() - start_s)

        await asyncio.gather(*(work() for _ in range(c)))
    return seconds


def _row(side: Side, case: str, c: int, loads: Sequence[_Load]) -> Row:
    names = ("requests_per_s", "p50_ms", "p99_ms", "cpu_ms", "engine_cpu_ms")
    samples = {name: [float(getattr(load, name)) for load in loads] for name in names}
    return Row({"side": side.name, "case": case, "c": c}, samples)


def _text_pairs(side: Side, after_sample: AfterSample) -> list[Row]:
    """Requests without media, to the same vLLM: straight, and through Afferent."""
    body = (
        f'{{"model":"{MODEL}","max_tokens":8,"temperature":0,"ignore_eos":true,'
        '"messages":[{"role":"user","content":"What is this?"}]}'
    ).encode()
    loads: dict[str, list[_Load]] = {"text, direct": [], "text, through": []}
    for _ in range(_NUM_PAIRS):
        for name, uds in (("text, direct", side.uds), ("text, through", None)):
            loads[name].append(_load(side, [body] * _NUM_TEXT, 16, uds=uds))
            after_sample()
    return [_row(side, name, 16, found) for name, found in loads.items()]


def _find(rows: Sequence[Row], side: str, case: str, c: int) -> Row:
    wanted: dict[str, Any] = {"side": side, "case": case, "c": c}
    return next(row for row in rows if row.keys == wanted)


def _goals(rows: Sequence[Row], other: str) -> Iterator[Goal]:
    for c in (1, 16, 64):
        for case, most in (("misses", 0.6), ("repeats", 0.35)):
            ours, theirs = _find(rows, "afferent", case, c), _find(rows, other, case, c)
            ratio = ours.median("cpu_ms") / theirs.median("cpu_ms")
            yield Goal(f"{case}, c={c}: cpu_ms / {other}'s <= {most:g}", ratio <= most, ratio)
        ours, theirs = _find(rows, "afferent", "repeats", c), _find(rows, other, "repeats", c)
        ratio = ours.median("requests_per_s") / theirs.median("requests_per_s")
        yield Goal(f"repeats, c={c}: requests_per_s / {other}'s >= 2", ratio >= 2, ratio)
    ours, theirs = _find(rows, "afferent", "misses", 1), _find(rows, other, "misses", 1)
    more = ours.median("p50_ms") - theirs.median("p50_ms")
    yield Goal(f"misses, c=1: p50_ms - {other}'s <= 5", more <= 5, more)


def _memory_goals(memories: dict[str, vllm_servers.Memory], other: str) -> Iterator[Goal]:
    ours, theirs = memories["afferent"], memories[other]
    ratio = ours.outside / theirs.outside
    yield Goal(f"memory outside of the worker / {other}'s <= 0.6", ratio <= 0.6, ratio)
    ratio = ours.worker / theirs.worker
    yield Goal(f"the worker's memory / {other}'s <= 1.05", ratio <= 1.05, ratio)


def _text_goals(rows: Sequence[Row]) -> Iterator[Goal]:
    direct, through = rows
    pairs = zip(through.samples["requests_per_s"], direct.samples["requests_per_s"], strict=True)
    ratios = sorted(ours / theirs for ours, theirs in pairs)
    ratio = statistics.median(ratios)
    yield Goal("text: requests_per_s through / direct >= 0.95", ratio >= 0.95, ratio)
    more = through.median("cpu_ms") - direct.median("cpu_ms")
    yield Goal("text: cpu_ms through - direct <= 3", more <= 3, more)
