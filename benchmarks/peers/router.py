"""Measure the cost of a prompt for a router: `afferent render` beside ``vllm launch render``.

A router needs the tokens of a prompt, and the hashes and placeholders of its images. Both servers
answer with these alone (``mm_payload: none``). A request has four new images of 1280 x 720, as JPEG
in base64. Both servers are bound to one core, the client to another one, and they work in turn
with the same requests.

- ``closed``: one client, which waits for each answer.
- ``35/s``: requests by the clock, whether or not the earlier ones were answered. The times count
  from the clock. vLLM is left out: it would fall behind from the first second.

Memory is read after the load: the proportional set size of all processes, arena included.

The benchmark needs two cores and an environment with vLLM (``make setup-vllm``), and takes some
five minutes.

Expected before the measurement: vLLM takes 250 to 400 ms of processor time for a request, Afferent
8 to 12 ms (30 times less), most of it for the bytes: the socket, base64, two digests. At 35/s on
one core the median is 10 ms, and the 99th percentile between 15 and 25 ms. Memory is 200 to 300 MB,
most of it the private pages of five Python processes.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import numpy as np

from afferent.errors import ConfigError
from benchmarks.pages import photo
from benchmarks.peers import servers
from benchmarks.peers.load import put
from benchmarks.peers.servers import MODEL, Side
from benchmarks.record import BusyMeter, Goal, Report, Row, quiet_rounds
from tools import vllm_env

QUESTION = "What does a prompt cost for a router: four 720p images a request, one core?"
COLUMNS = ("side", "case", "requests_per_s", "p50_ms", "p99_ms", "cpu_ms")

_VLLM, _AFFERENT = "vllm", "afferent"
_PATH = "/v1/chat/completions/render"
_NUM_ROUNDS = 3
_NUM_CLOSED, _NUM_PACED, _NUM_QUICK = 160, 1050, 8
_RATE_PER_S = 35
_NUM_IMAGES = 4
_NUM_DRAWN = 8
_MAX_POSITIONS = 8192
_SOI_NBYTES = 2
_MAX_MIB = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python", type=Path, default=vllm_env.python_of(vllm_env.FOLDER), help="with vLLM"
    )


def num_steps(*, quick: bool, python: Path) -> int:
    return 3 * (1 if quick else _NUM_ROUNDS)


def run(*, quick: bool, python: Path, after_sample: Callable[[], None]) -> Report:
    if not python.exists():
        raise ConfigError(f"{python} is not there: make setup-vllm")
    report, bodies = Report("router", QUESTION), _Bodies()
    num_closed, num_paced = (_NUM_QUICK, 5 * _NUM_QUICK) if quick else (_NUM_CLOSED, _NUM_PACED)
    with tempfile.TemporaryDirectory() as folder, _cores() as (core, _):
        model = servers.make_model(Path(folder), max_positions=_MAX_POSITIONS)
        with (
            servers.stock_render(python, model, core=core) as stock,
            servers.afferent_prompts(model, core=core) as afferent,
        ):
            sides = {_VLLM: stock, _AFFERENT: afferent}
            report.notes.append(_compare(sides, bodies.fresh(1)[0]))
            for side in sides.values():
                put(side, _PATH, bodies.fresh(4), 1)
            before = {name: _memory_nbytes(side) for name, side in sides.items()}
            meter = BusyMeter()

            def one_round() -> dict[tuple[str, str], dict[str, float]]:
                found = {}
                asked = bodies.fresh(num_closed)
                for name, side in sides.items():
                    load = put(side, _PATH, asked, 1)
                    found[name, "closed"] = {
                        each: float(getattr(load, each)) for each in COLUMNS[2:]
                    }
                    after_sample()
                found[_AFFERENT, "35/s"] = _paced(afferent, bodies.fresh(num_paced))
                after_sample()
                return found

            rounds = quiet_rounds(
                one_round, number=1 if quick else _NUM_ROUNDS, report=report, what="all"
            )
            report.rows = [
                Row(
                    {"side": side, "case": case},
                    {name: [each[side, case][name] for each in rounds] for name in COLUMNS[2:]},
                )
                for side, case in rounds[0]
            ]
            report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
            nbytes = {name: _memory_nbytes(side) for name, side in sides.items()}
    report.notes += [
        f"{name}: {before[name] / 2**20:,.0f} MiB before the load, {each / 2**20:,.0f} after it"
        for name, each in nbytes.items()
    ]
    report.goals = list(_goals(report.rows, nbytes[_AFFERENT]))
    return report


class _Bodies:
    """Requests with new images: drawn photographs that differ in a comment of their files."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self._files = [_jpeg(rng) for _ in range(_NUM_DRAWN)]
        self._next = itertools.count()

    def fresh(self, number: int) -> list[bytes]:
        return [self._body() for _ in range(number)]

    def _body(self) -> bytes:
        parts = [
            {"type": "image_url", "image_url": {"url": self._url(next(self._next))}}
            for _ in range(_NUM_IMAGES)
        ]
        content = [*parts, {"type": "text", "text": "What do these have in common?"}]
        return json.dumps(
            {
                "model": MODEL,
                "mm_payload": "none",
                "max_tokens": 1,
                "messages": [{"role": "user", "content": content}],
            }
        ).encode()

    def _url(self, number: int) -> str:
        file, text = self._files[number % _NUM_DRAWN], b"%08d" % number
        comment = b"\xff\xfe" + (len(text) + 2).to_bytes(2, "big") + text
        data = file[:_SOI_NBYTES] + comment + file[_SOI_NBYTES:]
        return "data:image/jpeg;base64," + base64.b64encode(data).decode()


def _jpeg(rng: np.random.Generator) -> bytes:
    out = io.BytesIO()
    photo(rng, 1280, 720).save(out, "JPEG", quality=90)
    return out.getvalue()


@contextmanager
def _cores() -> Iterator[tuple[int, int]]:
    """Bind this process to a core; yield the servers' core, and its own.

    Raises:
        ConfigError: There is one core alone.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        raise ConfigError("the benchmark needs two cores")
    os.sched_setaffinity(0, {allowed[1]})
    try:
        yield allowed[0], allowed[1]
    finally:
        os.sched_setaffinity(0, allowed)


def _compare(sides: dict[str, Side], body: bytes) -> str:
    """Check that both answers have the same tokens and placeholders; describe them."""
    answers = {
        name: httpx.post(side.url + _PATH, content=body, headers=_JSON, timeout=60).json()
        for name, side in sides.items()
    }
    ours, theirs = answers[_AFFERENT], answers[_VLLM]
    for part in ("token_ids", "features"):
        mine, their = ours[part], theirs[part]
        if part == "features":
            mine, their = ({k: each[k] for k in mine} for each in (mine, their))
        if mine != their:
            raise RuntimeError(f"the two sides answer with other {part}")
    return f"a request: {len(body) / 1e6:.1f} MB, {len(ours['token_ids'])} tokens"


_JSON = {"content-type": "application/json"}


def _paced(side: Side, bodies: Sequence[bytes]) -> dict[str, float]:
    """Send requests at `_RATE_PER_S`, and measure."""
    before, start_s = sum(side.cpu_s()), time.monotonic()
    seconds = sorted(asyncio.run(_send_paced(side.url + _PATH, bodies)))
    took_s = time.monotonic() - start_s
    return {
        "requests_per_s": len(bodies) / took_s,
        "p50_ms": statistics.median(seconds) * 1e3,
        "p99_ms": seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))] * 1e3,
        "cpu_ms": (sum(side.cpu_s()) - before) / len(bodies) * 1e3,
    }


async def _send_paced(url: str, bodies: Sequence[bytes]) -> list[float]:
    async with httpx.AsyncClient(timeout=60, headers=_JSON) as client:
        start_s = time.monotonic()

        async def send(index: int) -> float:
            due_s = start_s + index / _RATE_PER_S
            await asyncio.sleep(due_s - time.monotonic())
            answer = await client.post(url, content=bodies[index])
            answer.raise_for_status()
            return time.monotonic() - due_s

        return list(await asyncio.gather(*map(send, range(len(bodies)))))


def _memory_nbytes(side: Side) -> float:
    parts = side.memory_parts()
    return parts.private + parts.shared


def _goals(rows: Sequence[Row], nbytes: float) -> Iterator[Goal]:
    by_key = {(row.keys["side"], row.keys["case"]): row for row in rows}
    ours, theirs = by_key[_AFFERENT, "closed"], by_key[_VLLM, "closed"]
    pairs = zip(ours.samples["cpu_ms"], theirs.samples["cpu_ms"], strict=True)
    ratio = statistics.median(their / our for our, their in pairs)
    yield Goal("closed: vLLM's cpu_ms / ours >= 20", ratio >= 20, ratio)
    paced = by_key[_AFFERENT, "35/s"]
    p99_ms = paced.median("p99_ms")
    yield Goal("35/s: p99_ms <= 20", p99_ms <= 20, p99_ms)
    yield Goal("memory in MiB <= 256", nbytes <= _MAX_MIB * 2**20, nbytes / 2**20)
