"""Measure the processor time of an image, from a JPEG's bytes to features in the program's memory.

- `processor`: Pillow, then the model's own processor of `transformers`, in float32, with the
  backend that is installed: torchvision's, or the slower Pillow's.
- `hf`: `afferent.Features` in the same process, with the same bits.
- `compact`: `afferent.Features` in the same process; pixels stay bytes.
- `pool`: compact features by two confined workers; the time of all processes counts, the copy into
  the program's memory included.
- `loader`: `processor` in two workers of a `DataLoader`, which send tensors; all processes count.

Each side has one thread for each process.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from afferent import Features
from afferent.errors import ConfigError
from benchmarks.children import cpu_s
from benchmarks.pages import photo
from benchmarks.preprocess import backend_of_processor, write_model
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate

QUESTION = "How much processor time does an image take in a batch job?"
COLUMNS = ("width", "height", "path", "cpu_ms")

_WIDTH, _HEIGHT = 640, 480
_NUM_IMAGES, _QUICK_NUM_IMAGES = 200, 30
_NUM_WORKERS = 2
_PATHS = ("processor", "hf", "compact", "loader", "pool")
_GOALS = (
    ("hf", "processor", 1.5),
    ("compact", "processor", 2.5),
    ("pool", "loader", 2.5),
)


def num_steps(*, quick: bool) -> int:
    return len(_PATHS) * (MIN_SAMPLES + 1)


def run(*, quick: bool, after_sample: Callable[[], None]) -> Report:
    number = _QUICK_NUM_IMAGES if quick else _NUM_IMAGES
    report = Report("feature_batch", QUESTION)
    meter = BusyMeter()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        write_model(folder)
        files = _files(number)
        here = stack.enter_context(Features(folder))
        pool = stack.enter_context(Features(folder, where="pool", num_workers=_NUM_WORKERS))
        processor = _Processor(str(folder))
        loader = processor.loader(files)
        sides: dict[str, Callable[[], None]] = {
            "processor": lambda: processor.take(files),
            "hf": lambda: _take(here.make_many(files, form="hf")),
            "compact": lambda: _take(here.make_many(files)),
            "loader": lambda: _take(loader),
            # New bytes, so that nothing is found in the pool's store.
            "pool": lambda: _take(pool.make_many(_different(files))),
        }
        timed = {path: _timed(side, number) for path, side in sides.items()}
        samples = alternate(timed, num_samples=MIN_SAMPLES, after_sample=after_sample)
    keys = {"width": _WIDTH, "height": _HEIGHT}
    report.rows = [Row({**keys, "path": path}, {"cpu_ms": samples[path]}) for path in _PATHS]
    found = {row.keys["path"]: row.median("cpu_ms") for row in report.rows}
    for path, other, least in _GOALS:
        ratio = found[other] / found[path]
        report.goals.append(
            Goal(f"{path}: {least:g} times less than {other}", ratio >= least, ratio)
        )
    report.notes.append(backend_of_processor())
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    return report


def _files(number: int) -> list[bytes]:
    rng = np.random.default_rng(0)
    files = []
    for _ in range(number):
        file = io.BytesIO()
        photo(rng, _WIDTH, _HEIGHT).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def _different(files: Sequence[bytes]) -> list[bytes]:
    """Return the files with other ends, which decoders ignore."""
    return [file + secrets.token_bytes(8) for file in files]


def _take(results: Any) -> None:
    for made in results:
        if not isinstance(made, dict):
            raise ConfigError(f"an image of the benchmark failed: {made.error.message}")


class _Processor:
    """Model's own processor, in this process or in the workers of a `DataLoader`."""

    def __init__(self, folder: str) -> None:
        import torch
        from transformers import AutoImageProcessor

        torch.set_num_threads(1)
        self._processor = AutoImageProcessor.from_pretrained(folder)

    def __call__(self, data: bytes) -> dict[str, Any]:
        from PIL import Image

        with Image.open(io.BytesIO(data)) as image:
            return dict(self._processor(images=image, return_tensors="pt"))

    def take(self, files: Sequence[bytes]) -> None:
        for data in files:
            self(data)

    def loader(self, files: Sequence[bytes]) -> Any:
        """Return a loader over the files whose workers are started once."""
        from torch.utils.data import DataLoader

        mapped: Any = _Mapped(files, self)
        return DataLoader(
            mapped, batch_size=None, num_workers=_NUM_WORKERS, persistent_workers=True
        )


class _Mapped:
    """Data set of a function's results."""

    def __init__(self, files: Sequence[bytes], function: Callable[[bytes], Any]) -> None:
        self._files, self._function = files, function

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Any:
        return self._function(self._files[index])


def _timed(side: Callable[[], None], number: int) -> Callable[[], float]:
    """Return a function that measures the milliseconds of processor time of an image."""

    def measure() -> float:
        before = _all_cpu_s()
        side()
        return (_all_cpu_s() - before) / number * 1e3

    return measure


def _all_cpu_s() -> float:
    """Return the processor time of this process, its children, and those that have ended."""
    times = os.times()
    ended = times.children_user + times.children_system
    return time.process_time() + ended + sum(map(cpu_s, _descendants(os.getpid())))


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *_descendants(child)]
    return found
