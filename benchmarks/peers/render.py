"""Measure the cost of a request's images until their features exist, beside vLLM's render server.

Two servers that only preprocess, with the same model, run at the same time and work in turn: ``vllm
launch render``, and Afferent at its defaults with requests to ``render?features=1``. Pages are PNGs
of 1275 x 1650. Memory is measured every half second: the private memory of the processes, and the
shared memory (the arena). The lower bound of a hit is a third server in the same turns, which reads
the request, decodes its base64, digests it, and does nothing else.

vLLM's answer contains the features themselves, as base64 in JSON; ours contains handles to the
arena. Each is what the engine behind it needs, so this is a fair comparison. The clients discard
the answers.

The benchmark needs an environment with vLLM (``make setup-vllm``), and takes a quarter of an hour.

Expected before the measurement: misses 2 to 2.5 times vLLM's rate, hits 12 times, from measurements
of the parts; after a trial, a hit costs 1.5 times the lower bound for one client, and 2.5 times for
many.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from afferent.errors import ConfigError
from benchmarks.peers import servers
from benchmarks.peers.load import Load, Pages, put
from benchmarks.peers.servers import Side
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, quiet_rounds
from tools import vllm_env

QUESTION = "What do images cost until their features exist, beside vLLM's render server?"
COLUMNS = ("side", "case", "c", "requests_per_s", "p50_ms", "p99_ms", "cpu_ms", "growth_mb")

_VLLM, _AFFERENT, _FLOOR = "vllm", "afferent", "floor"
_PATHS = {
    _VLLM: "/v1/chat/completions/render",
    _AFFERENT: "/v1/chat/completions/render?features=1",
    _FLOOR: "/",
}
_CASES = (
    ("misses", 16, 32),
    ("misses", 64, 64),
    ("misses", 256, 256),
    ("hits", 1, 96),
    ("hits", 16, 192),
)
"""The cases: hits or misses, the number of clients, and the requests in a sample."""
_NUM_KNOWN = 16
_SAMPLE_EVERY_S = 0.5

AfterSample = Callable[[], None]


@dataclass(slots=True)
class _Most:
    """The maximal memory of a server during a measurement, in bytes."""

    private: float = 0.0
    whole: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python", type=Path, default=vllm_env.python_of(vllm_env.FOLDER), help="with vLLM"
    )


def num_steps(*, quick: bool, python: Path) -> int:
    asked = sum(_is_asked(name, case) for case, _, _ in _CASES for name in _PATHS)
    return asked * _num_rounds(quick=quick)


def _num_rounds(*, quick: bool) -> int:
    return 1 if quick else MIN_SAMPLES


def run(*, quick: bool, python: Path, after_sample: AfterSample) -> Report:
    if not python.exists():
        raise ConfigError(f"{python} is not there: make setup-vllm")
    report, most = Report("render", QUESTION), {name: _Most() for name in _PATHS}
    with tempfile.TemporaryDirectory() as folder:
        model = servers.make_model(Path(folder))
        with (
            servers.stock_render(python, model) as stock,
            servers.afferent_render(model) as afferent,
            servers.floor() as floor,
        ):
            sides, pages = {_VLLM: stock, _AFFERENT: afferent, _FLOOR: floor}, Pages()
            for name, side in sides.items():
                put(side, _PATHS[name], pages.fresh(4), 4)
            base = {name: side.memory_parts() for name, side in sides.items()}
            meter = BusyMeter()
            known = pages.fresh(_NUM_KNOWN)
            for case, c, number in _CASES:
                if case == "hits":  # the misses may have evicted them
                    for name, side in sides.items():
                        put(side, _PATHS[name], known, 4)
                asked = {name: side for name, side in sides.items() if _is_asked(name, case)}

                def one_round() -> dict[str, tuple[Load, float]]:
                    found = {}
                    for name, side in asked.items():  # noqa: B023 - called before the next case
                        bodies = _bodies(case, known, pages, number)  # noqa: B023
                        with _watching(side, most[name]) as now:
                            load = put(side, _PATHS[name], bodies, c)  # noqa: B023
                        found[name] = load, (now.private - base[name].private) / 1e6
                        after_sample()
                    return found

                rounds = quiet_rounds(
                    one_round,
                    number=_num_rounds(quick=quick),
                    report=report,
                    what=f"{case}, c={c}",
                )
                report.rows += [
                    _row(name, case, c, [each[name] for each in rounds]) for name in asked
                ]
            report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.notes += [
        f"{name}: at most {most[name].whole / 1e6:,.0f} MB, what is shared included; "
        f"{(base[name].private + base[name].shared) / 1e6:,.0f} before"
        for name in sides
    ]
    report.goals = list(_goals(report.rows, most))
    return report


def _is_asked(name: str, case: str) -> bool:
    return name != _FLOOR or case == "hits"


def _bodies(case: str, known: Sequence[bytes], pages: Pages, number: int) -> list[bytes]:
    if case == "misses":
        return pages.fresh(number)
    return list(itertools.islice(itertools.cycle(known), number))


@contextmanager
def _watching(side: Side, most: _Most) -> Iterator[_Most]:
    """Measure the maximal memory in this block; ``most`` has the maximum of all blocks."""
    now, is_over = _Most(), threading.Event()

    def look() -> None:
        while True:
            parts = side.memory_parts()
            for each in (now, most):
                each.private = max(each.private, parts.private)
                each.whole = max(each.whole, parts.private + parts.shared)
            if is_over.wait(_SAMPLE_EVERY_S):
                return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield now
    finally:
        is_over.set()
        thread.join()


def _row(name: str, case: str, c: int, rounds: Sequence[tuple[Load, float]]) -> Row:
    """Return a row with the results of all rounds, and the maximal growth of the server in MB."""
    names = ("requests_per_s", "p50_ms", "p99_ms", "cpu_ms")
    samples = {each: [float(getattr(load, each)) for load, _ in rounds] for each in names}
    samples["growth_mb"] = [growth_mb for _, growth_mb in rounds]
    return Row({"side": name, "case": case, "c": c}, samples)


def _goals(rows: Sequence[Row], most: dict[str, _Most]) -> Iterator[Goal]:
    by_key = {(row.keys["side"], row.keys["case"], row.keys["c"]): row for row in rows}
    for case, c, _ in _CASES:
        ours, theirs = by_key[_AFFERENT, case, c], by_key[_VLLM, case, c]
        least = 3 if case == "misses" else 18
        pairs = zip(ours.samples["requests_per_s"], theirs.samples["requests_per_s"], strict=True)
        ratio = statistics.median(our / their for our, their in pairs)
        yield Goal(f"{case}, c={c}: requests_per_s / vllm's >= {least}", ratio >= least, ratio)
    ours, theirs = by_key[_AFFERENT, "misses", 256], by_key[_VLLM, "misses", 256]
    ratio = max(ours.samples["growth_mb"]) / max(theirs.samples["growth_mb"])
    yield Goal("misses, c=256: growth / vllm's <= 0.05", ratio <= 0.05, ratio)
    ratio = most[_AFFERENT].whole / most[_VLLM].whole
    yield Goal("the whole server / vllm's < 1", ratio < 1, ratio)
    for c in (1, 16):
        ours, theirs = by_key[_AFFERENT, "hits", c], by_key[_FLOOR, "hits", c]
        ratio = ours.median("cpu_ms") / theirs.median("cpu_ms")
        yield Goal(f"hits, c={c}: cpu_ms / floor <= 1.6", ratio <= 1.6, ratio)
