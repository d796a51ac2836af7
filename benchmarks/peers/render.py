"""What do the images of a request cost until their features exist, beside vLLM's render server?

Two servers that only prepare, with the same model, which run at the same time and work in turn:
``vllm launch render``, and Afferent at its defaults, asked for ``render?features=1``. Pages of 1275
x 1650 as PNG. Memory is read every half second: what the processes have for themselves, and what
they share beside it (the arena). The floor of a hit is a third server in the same turns, which
reads the request, decodes its base64 and digests that, and does nothing else.

vLLM's answer holds the features themselves, as base64 in JSON; ours says where they lie in the
arena. That is what each of them does for the engine that comes next, and so it is compared; who
asks throws the answers away as they come.

It needs an environment with vLLM (``make setup-vllm``), and takes a quarter of an hour.

Expected before: misses 2 to 2.5 times vLLM's, hits 12 times, since that is what the parts were
measured to take; after a trial, a hit 1.5 floors where they come one by one, 2.5 where many do.
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
"""What is asked, by how many at a time, and how often in a sample."""
_NUM_KNOWN = 16
_SAMPLE_EVERY_S = 0.5

AfterSample = Callable[[], None]


@dataclass(slots=True)
class _Most:
    """The most that a server had while something was asked of it, in bytes."""

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
                if case == "hits":  # the misses may be all that is kept now
                    for name, side in sides.items():
                        put(side, _PATHS[name], known, 4)
                asked = {name: side for name, side in sides.items() if _is_asked(name, case)}

                def one_round() -> dict[str, tuple[Load, float]]:
                    found = {}
                    for name, side in asked.items():  # noqa: B023 - it is called before the next
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
    """The most of this block; ``most`` has what all blocks had."""
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
    """Of each round what was asked, and by how many MB the server had grown at most."""
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
