"""Measure whole batch jobs over files of one folder: programs as a user would write them.

The programs are those of `benchmarks.jobs`; each uses two worker processes on the same cores. The
program gets the features of each item in its own memory:

- `loader`, `ray_data`: the model's own processor of `transformers` with torchvision, in the workers
  of a `DataLoader` or in actors of Ray Data. Float32.
- `pool_hf`: `afferent.Features` with a pool. The same float32, to the last bit.
- `pool`, `mapper`: compact features, by a pool or by `afferent.ray.FeatureMapper` in actors.

Or it gets a number or a reference for each item, and the features stay where they were made:

- `loader_left`, `ray_data_left`; `pool_left`, `mapper_left` (features stay in a store).

Each program runs with all files, and with two. ``wall_ms`` and ``cpu_ms`` are the difference
between both runs for each further item, so that imports and starts of processes do not count;
``start_s`` is the time of the run with two. The processor time is that of all processes.

It needs torchvision and Ray: ``make bench-ray NAME=batch_job``.
"""

from __future__ import annotations

import ast
import contextlib
import io
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from afferent.errors import ConfigError
from benchmarks.children import cpu_s
from benchmarks.gate_memory import trees
from benchmarks.jobs.run import Ran
from benchmarks.pages import PageFiles, photo
from benchmarks.preprocess import write_model
from benchmarks.record import Goal, Report, Row, machine_ticks

QUESTION = "How long does a batch job over a folder of files take?"
COLUMNS = ("files", "side", "lines", "wall_ms", "cpu_ms", "start_s")

_SIDES: Final = (
    *("loader", "ray_data", "pool_hf", "pool", "mapper"),
    *("loader_left", "ray_data_left", "pool_left", "mapper_left"),
)
_GOALS: Final = (
    ("pool", "loader", 2.5, ("wall_ms", "cpu_ms")),
    ("pool", "ray_data", 2.5, ("wall_ms", "cpu_ms")),
    ("mapper", "ray_data", 2.5, ("wall_ms", "cpu_ms")),
    ("pool_hf", "loader", 1.5, ("cpu_ms",)),
    ("pool_hf", "ray_data", 1.5, ("cpu_ms",)),
    ("pool_left", "loader_left", 1.0, ("wall_ms", "cpu_ms")),
    ("mapper_left", "ray_data_left", 1.0, ("wall_ms", "cpu_ms")),
)
"""A side, another one, and how many times less the first has to take."""
_NUM_SAMPLES, _QUICK_NUM_SAMPLES = 3, 1
_NUM_JPEGS, _NUM_PAGES, _QUICK_PART = 10_000, 1_000, 50
_WIDTH, _HEIGHT = 640, 480
_PAGE = (1275, 1650)
_NUM_VIEWS: Final = 100
"""Pictures that are cut from a drawn one."""
_FEW: Final = 2
_PERIOD_S: Final = 0.25
_TIMEOUT_S: Final = 1800.0
_ROOT: Final = Path(__file__).parents[1]


def num_steps(*, quick: bool) -> int:
    return 2 * 2 * len(_SIDES) * (_QUICK_NUM_SAMPLES if quick else _NUM_SAMPLES)


def run(*, quick: bool, after_sample: Callable[[], None]) -> Report:
    for package in ("torchvision", "ray"):
        if find_spec(package) is None:
            raise ConfigError(f"{package} is missing: make bench-ray NAME=batch_job")
    report = Report("batch_job", QUESTION)
    with tempfile.TemporaryDirectory() as name:
        (model := Path(name, "model")).mkdir()
        write_model(model)
        folders = {
            "JPEG 640 x 480": write_jpegs(Path(name, "jpegs"), _part(_NUM_JPEGS, quick=quick)),
            "PNG 1275 x 1650": _pages(Path(name, "pages"), _part(_NUM_PAGES, quick=quick)),
        }
        own_ticks, before = 0.0, machine_ticks()
        for files, folder in folders.items():
            samples: dict[str, list[_Sample]] = {side: [] for side in _SIDES}
            for _ in range(_QUICK_NUM_SAMPLES if quick else _NUM_SAMPLES):
                for side in _SIDES:
                    samples[side].append(each := _sample(side, model, folder, after_sample))
                    own_ticks += each.own_ticks
            _check({side: found[0].returned for side, found in samples.items()})
            for side, found in samples.items():
                row = Row(
                    {"files": files, "side": side, "lines": _num_lines(side)},
                    {
                        name: [getattr(each, name) for each in found]
                        for name in ("wall_ms", "cpu_ms", "start_s")
                    },
                )
                report.rows.append(row)
            report.goals += _goals(files, report.rows[-len(_SIDES) :])
    report.notes.append(
        f"{_part(_NUM_JPEGS, quick=quick):,} JPEGs and {_part(_NUM_PAGES, quick=quick):,} pages, "
        "all different; lines: of the program, without docstring and blank lines"
    )
    report.busy_cores_elsewhere = _busy_cores(before, own_ticks)
    return report


@dataclass(frozen=True, slots=True)
class _Sample:
    wall_ms: float
    cpu_ms: float
    start_s: float
    returned: int
    own_ticks: float


def _busy_cores(before: tuple[float, float], own_ticks: float) -> float:
    """Return the cores that others kept busy, this process's own readings included.

    `BusyMeter` would count processes of Ray as others: their parents do not wait for them.
    """
    busy, total = (now - then for now, then in zip(machine_ticks(), before, strict=True))
    return max(0.0, (busy - own_ticks) / max(total, 1.0) * (os.cpu_count() or 1))


def _sample(side: str, model: Path, folder: Path, after_sample: Callable[[], None]) -> _Sample:
    count = sum(1 for _ in folder.iterdir())
    few, few_cpu_s = _ran(side, model, folder, _FEW)
    after_sample()
    ran, ran_cpu_s = _ran(side, model, folder, count)
    after_sample()
    further = (count - _FEW) / 1e3
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    # A quick run has so few files that both runs may take the same number of the clock's ticks.
    return _Sample(
        max(ran.wall_s - few.wall_s, 1 / ticks_per_s) / further,
        max(ran_cpu_s - few_cpu_s, 1 / ticks_per_s) / further,
        few.wall_s,
        ran.returned,
        (few_cpu_s + ran_cpu_s) * ticks_per_s,
    )


def _ran(side: str, model: Path, folder: Path, count: int) -> tuple[Ran, float]:
    """Run a program; return what it reports, and the processor time of all its processes."""
    line = [sys.executable, "-m", "benchmarks.jobs.run", side, str(model), str(folder), str(count)]
    popen = subprocess.Popen(line, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with _cpu_meter(popen.pid) as total_cpu_s:
        out, _ = popen.communicate(timeout=_TIMEOUT_S)
    if popen.returncode:
        raise ConfigError(f"the program {side} failed: {' '.join(line)}")
    return msgspec.json.decode(out.splitlines()[-1], type=Ran), total_cpu_s()


@contextlib.contextmanager
def _cpu_meter(pid: int) -> Iterator[Callable[[], float]]:
    """Read the processor time of all processes of a tree, as often as `_PERIOD_S`.

    What a process uses between the last reading and its end is not counted.
    """
    found: dict[int, float] = {}
    is_over = threading.Event()

    def read() -> None:
        while not is_over.wait(_PERIOD_S):
            for each in trees([pid]):
                found[each] = max(found.get(each, 0.0), cpu_s(each))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield lambda: sum(found.values())
    finally:
        is_over.set()
        thread.join()


def _check(returned: dict[str, int]) -> None:
    """Raise if programs made different features."""
    left = {side for side in returned if side.endswith("_left")}
    for sides in (left, returned.keys() - left):
        if len({returned[side] for side in sides}) > 1:
            raise RuntimeError(f"the programs made different features: {returned}")


def _goals(files: str, rows: list[Row]) -> Iterator[Goal]:
    found = {row.keys["side"]: row for row in rows}
    for side, other, least, columns in _GOALS:
        for column in columns:
            ratio = found[other].median(column) / found[side].median(column)
            what = f"{files}: {column} of {other} / {side} >= {least:g}"
            yield Goal(what, ratio >= least, ratio)


def _num_lines(side: str) -> int:
    """Return the lines of a program, without its docstring and blank lines."""
    text = (_ROOT / "benchmarks" / "jobs" / f"{side}.py").read_text(encoding="utf-8")
    docstring = ast.parse(text).body[0].end_lineno or 0
    return sum(bool(line.strip()) for line in text.splitlines()[docstring:])


def _part(number: int, *, quick: bool) -> int:
    return number // _QUICK_PART if quick else number


# Files


def write_jpegs(folder: Path, number: int) -> Path:
    """Write different JPEGs, as parts of larger drawn pictures: these take longer to draw.

    Returns:
        The folder.
    """
    folder.mkdir()
    numbers = range(-(-number // _NUM_VIEWS))
    with multiprocessing.get_context("spawn").Pool() as pool:
        pool.starmap(_write_views, [(folder, each) for each in numbers])
    for path in sorted(folder.iterdir())[number:]:
        path.unlink()
    return folder


def _write_views(folder: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = photo(rng, 2 * _WIDTH, 2 * _HEIGHT)
    for number in range(_NUM_VIEWS):
        left, top = int(rng.integers(_WIDTH)), int(rng.integers(_HEIGHT))
        view = drawn.crop((left, top, left + _WIDTH, top + _HEIGHT))
        file = io.BytesIO()
        view.save(file, "JPEG", quality=90)
        (folder / f"{seed:05}-{number:03}.jpg").write_bytes(file.getvalue())


def _pages(folder: Path, number: int) -> Path:
    folder.mkdir()
    files = PageFiles(*_PAGE)
    for each in range(number):
        (folder / f"{each:05}.png").write_bytes(files.page(each))
    return folder
