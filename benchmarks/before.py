"""Compare this version with an earlier one: ``make bench ARGS="before --revision REVISION"``.

Two servers with the built-in model run at the same time, on the same cores and in the same
environment: one of this tree and one of an earlier revision. They get the load in turn: questions
without media, new small images, new pages of 1275 x 1650 through ``render``, and known pages. The
result is the ratio of neighbouring turns: its 95 % interval has to reach 1.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from afferent.errors import ConfigError
from benchmarks.attackers import body_of, small_image
from benchmarks.children import command, cpu_s, free_port, wait_until_it_answers
from benchmarks.gate_memory import trees
from benchmarks.pages import PageFiles
from benchmarks.peers.load import post_all
from benchmarks.record import BusyMeter, Goal, Report, Row

QUESTION = "Is this version as fast as an earlier one?"
COLUMNS = ("case", "c", "before_per_s", "now_per_s", "before_cpu_ms", "now_cpu_ms")

ROOT: Final = Path(__file__).parents[1]
_CHAT, _RENDER = "/v1/chat/completions", "/v1/chat/completions/render"
_START_TIMEOUT_S = 120.0
_NUM_PAIRS, _NUM_KNOWN, _NUM_RESAMPLED = 11, 16, 10_000
_QUICK_PART = 10
"""A quick run sends one of so many requests."""
_ARENA = "512MiB"

AfterSample = Callable[[], None]
Bodies = Callable[[int], list[bytes]]


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    path: str
    c: int
    num_requests: int
    bodies: Bodies


@dataclass(slots=True)
class Side:
    """A server and its supervisor process."""

    url: str
    popen: subprocess.Popen[bytes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", default="HEAD^", help="as git names it (%(default)s)")


def num_steps(*, quick: bool, revision: str) -> int:
    return 2 * (_num_pairs(quick=quick) + 1) * len(_cases(quick=quick))


def _num_pairs(*, quick: bool) -> int:
    return 3 if quick else _NUM_PAIRS


def _cases(*, quick: bool) -> list[_Case]:
    files, numbers, seeds = PageFiles(1275, 1650), itertools.count(), itertools.count(70_000_000)

    def text(number: int) -> list[bytes]:
        return [body_of([])] * number

    def small(number: int) -> list[bytes]:
        return [body_of([("png", small_image(next(seeds)))]) for _ in range(number)]

    def pages(number: int) -> list[bytes]:
        return [body_of([("png", files.page(next(numbers)))]) for _ in range(number)]

    known = itertools.cycle(pages(_NUM_KNOWN))
    few = _QUICK_PART if quick else 1
    return [
        _Case("text", _CHAT, 16, 400 // few, text),
        _Case("small images", _CHAT, 16, 100 // few, small),
        _Case("pages", _RENDER, 4, 60 // few, pages),
        _Case(
            "pages that are known", _RENDER, 16, 400 // few, lambda n: [*itertools.islice(known, n)]
        ),
    ]


def run(*, quick: bool, revision: str, after_sample: AfterSample) -> Report:
    report, meter = Report("before", QUESTION), BusyMeter()
    with ExitStack() as stack:
        old = stack.enter_context(_tree_of(revision))
        sides = {
            "before": stack.enter_context(server_of(old)),
            "now": stack.enter_context(server_of(ROOT)),
        }
        for case in _cases(quick=quick):
            report.rows.append(_measure(case, sides, _num_pairs(quick=quick), after_sample))
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.goals = [goal for row in report.rows for goal in _goals(row)]
    report.notes.append(f"before: {revision}")
    return report


def _measure(case: _Case, sides: dict[str, Side], num_pairs: int, after_sample: AfterSample) -> Row:
    samples: dict[str, list[float]] = {
        f"{side}_{what}": [] for side in sides for what in ("per_s", "cpu_ms")
    }
    for number in range(num_pairs + 1):
        # The order alternates, so that changes over time affect both sides.
        for name in sorted(sides, reverse=number % 2 == 1):
            per_s, cpu_ms = _load(sides[name], case)
            if number:
                samples[f"{name}_per_s"].append(per_s)
                samples[f"{name}_cpu_ms"].append(cpu_ms)
            after_sample()
    return Row({"case": case.name, "c": case.c}, samples)


def _load(side: Side, case: _Case) -> tuple[float, float]:
    """Return requests a second, and milliseconds of processor time per request."""
    bodies = case.bodies(case.num_requests)
    pids = trees([side.popen.pid])
    used_s = -sum(map(cpu_s, pids))
    _, took_s = asyncio.run(post_all(side.url + case.path, bodies, case.c))
    used_s += sum(map(cpu_s, pids))
    return len(bodies) / took_s, used_s / len(bodies) * 1e3


def _goals(row: Row) -> Iterator[Goal]:
    ratios = [
        now / before
        for now, before in zip(row.samples["now_per_s"], row.samples["before_per_s"], strict=True)
    ]
    middle, least, most = interval(ratios)
    what = (
        f"{row.keys['case']}: now / before {middle:.3f}, 95 % in {least:.3f}..{most:.3f}, reaches 1"
    )
    yield Goal(what, most >= 1, most)


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios, and its 95 % interval by resampling."""
    logs = np.log(ratios)
    rng = np.random.default_rng(1)
    means = rng.choice(logs, (_NUM_RESAMPLED, len(logs))).mean(axis=1)
    least, most = np.quantile(means, (0.025, 0.975))
    return float(np.exp(logs.mean())), float(np.exp(least)), float(np.exp(most))


@contextmanager
def _tree_of(revision: str) -> Iterator[Path]:
    """Yield a temporary folder with the sources of a revision, and its compiled part.

    Raises:
        ConfigError: There is no such revision, or it can't be compiled.
    """
    line = ["git", "-C", str(ROOT), "archive", "--format=tar", revision]
    found = subprocess.run(line, capture_output=True, check=False)
    if found.returncode:
        raise ConfigError(f"--revision {revision}: {found.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
            archive.extractall(folder, filter="data")
        build = [sys.executable, "-c", "from setuptools import setup; setup()"]
        build += ["egg_info", "build_ext", "--inplace"]
        built = subprocess.run(build, cwd=folder, capture_output=True, text=True, check=False)
        if built.returncode:
            raise ConfigError(f"--revision {revision}: {built.stderr.strip()[-2000:]}")
        yield Path(folder)


@contextmanager
def server_of(tree: Path, *flags: str) -> Iterator[Side]:
    """Run a server of this tree until the block ends; wait until it is ready."""
    port = free_port()
    line = [sys.executable, "-m", "afferent.cli", "serve", "shapes", "--port", str(port)]
    line += ["--arena-nbytes", _ARENA, *flags]
    env = {"PYTHONPATH": str(tree / "src")}
    with tempfile.TemporaryFile() as log, command(line, env=env, stdout=log, stderr=log) as popen:
        url = f"http://127.0.0.1:{port}"
        try:
            wait_until_it_answers(popen, f"{url}/ready", timeout_s=_START_TIMEOUT_S, log="")
        except RuntimeError:
            log.seek(0)
            said = log.read()[-2000:].decode(errors="replace")
            raise RuntimeError(f"the server of {tree} did not start:\n{said}") from None
        yield Side(url, popen)
