"""Measure the memory of the features of rollouts in eight training processes.

Each image has sixteen rollouts, two of them for each process, which keeps the features of all its
rollouts and reads each byte:

- `afferent`: a rollout has a reference (`SharedItem`) to features in the store of a pool.
- `ray`: a rollout has the reference that `ray.put` returned, where Ray is installed
  (``make bench-ray NAME=rollouts``).
- `copies`: each process gets the features of an image once, for both of its rollouts.
- `value`: each rollout has features of its own.

Measured is the growth of all processes of a side, makers of features and daemons included, from the
time when they have imported all that they need. It is read from ``smaps_rollup``: ``private_mib``
is the proportional size of all memory but shared memory, and ``shared_mib`` that of shared memory,
so that each page counts once. ``ratio`` is their sum, in bytes of the distinct features.

``open_ms`` is the time until a process has arrays of a rollout's reference; one process after
another opens its references.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from afferent import DaemonStore, Features, ItemFeatures, MiB, SharedItem
from benchmarks.gate_memory import pss_nbytes, trees
from benchmarks.pages import photo
from benchmarks.peers import ray_store
from benchmarks.preprocess import write_model
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate
from benchmarks.rollout_holder import Held

QUESTION = "How much memory do the features of rollouts take in eight training processes?"
COLUMNS = ("side", "private_mib", "shared_mib", "ratio", "open_ms")

_WIDTH, _HEIGHT = 640, 480
_NUM_IMAGES, _QUICK_NUM_IMAGES = 128, 16
_NUM_PROCESSES: Final = 8
_NUM_ROLLOUTS: Final = 16
_MAX_RATIO, _MAX_OPEN_MS = 1.05, 1.0
_ARENA_NBYTES = 256 * MiB


def num_steps(*, quick: bool) -> int:
    return (3 + ray_store.is_installed()) * (_num_samples(quick=quick) + 1)


def _num_samples(*, quick: bool) -> int:
    return 1 if quick else MIN_SAMPLES


def run(*, quick: bool, after_sample: Callable[[], None]) -> Report:
    report = Report("rollouts", QUESTION)
    meter = BusyMeter()
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        measured = _Measured(Path(name), _files(_QUICK_NUM_IMAGES if quick else _NUM_IMAGES))
        sides = {"afferent": measured.afferent, "copies": measured.copies, "value": measured.value}
        if ray_store.is_installed():
            sides["ray"] = measured.ray
        else:
            report.notes.append(ray_store.MISSING)
        samples = alternate(sides, num_samples=_num_samples(quick=quick), after_sample=after_sample)
    for side, found in samples.items():
        report.rows.append(Row({"side": side}, _columns(found, measured.nbytes)))
    ours = report.rows[0]
    ratio, open_ms = ours.median("ratio"), ours.median("open_ms")
    report.goals = [
        Goal(f"memory <= {_MAX_RATIO:g} of the distinct features", ratio <= _MAX_RATIO, ratio),
        Goal(f"open_ms <= {_MAX_OPEN_MS:g}", open_ms <= _MAX_OPEN_MS, open_ms),
    ]
    report.notes += [
        f"{measured.nbytes / MiB:.1f} MiB of distinct features: {len(measured.files)} images of "
        f"{_WIDTH} x {_HEIGHT}; {_NUM_PROCESSES} processes, {_NUM_ROLLOUTS} rollouts of each image",
        f"afferent: the store has got {measured.backed_nbytes / MiB:.1f} MiB of memory meanwhile; "
        "what no process maps yet is not in the table; page tables are filled by the MiB",
    ]
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    return report


@dataclass(frozen=True, slots=True)
class _Sample:
    private_nbytes: float
    shared_nbytes: float
    open_ms: float | None = None


def _columns(samples: Sequence[_Sample], nbytes: int) -> dict[str, list[float]]:
    """Return the columns of a side; ``nbytes`` is the size of the distinct features."""
    columns = {
        "private_mib": [each.private_nbytes / MiB for each in samples],
        "shared_mib": [each.shared_nbytes / MiB for each in samples],
        "ratio": [(each.private_nbytes + each.shared_nbytes) / nbytes for each in samples],
    }
    open_ms = [each.open_ms for each in samples if each.open_ms is not None]
    return {**columns, "open_ms": open_ms} if open_ms else columns


class _Measured:
    """Sides of the comparison, over the same files.

    Attributes:
        files: Files of the images.
        nbytes: Bytes of their features.
        backed_nbytes: Memory that the last store got for them.
    """

    def __init__(self, folder: Path, files: Sequence[bytes]) -> None:
        self._folder, self.files = folder, files
        self._here = Features(folder)
        made = [self._here.make(file) for file in files]
        self.nbytes = sum(each.nbytes for each in made)
        self._total = sum(int(array.sum()) for each in made for array in each.values())
        self.backed_nbytes = 0

    def afferent(self) -> _Sample:
        with contextlib.ExitStack() as stack:
            features = stack.enter_context(
                Features(self._folder, where="pool", num_workers=1, arena_nbytes=_ARENA_NBYTES)
            )
            store = stack.enter_context(DaemonStore(str(features.address), name="bench"))
            holders = stack.enter_context(_holders(features.share(file_of(seed=-1))))
            before, backed_nbytes = _memory(), store.stat().backed_nbytes
            items = list(features.share_many(self.files))
            held = []
            for holder in holders:
                holder.send(items * (_NUM_ROLLOUTS // _NUM_PROCESSES))
                held.append(holder.keep())
            private_nbytes, shared_nbytes = _growth(before)
            self.backed_nbytes = store.stat().backed_nbytes - backed_nbytes
            self._check(held, num_times=_NUM_ROLLOUTS)
            return _Sample(private_nbytes, shared_nbytes, _median_ms(each.open_ms for each in held))

    def copies(self) -> _Sample:
        return self._by_value(num_times=1)

    def value(self) -> _Sample:
        return self._by_value(num_times=_NUM_ROLLOUTS // _NUM_PROCESSES)

    def _by_value(self, *, num_times: int) -> _Sample:
        with _holders(self._here.make(file_of(seed=-1))) as holders:
            before = _memory()
            for made in self._here.make_many(self.files):
                for holder in holders:
                    holder.send([made] * num_times)
            held = [holder.keep() for holder in holders]
            private_nbytes, shared_nbytes = _growth(before)
            self._check(held, num_times=num_times * _NUM_PROCESSES)
            return _Sample(private_nbytes, shared_nbytes)

    def ray(self) -> _Sample:
        with ray_store.ray_store(_ARENA_NBYTES, _NUM_PROCESSES, preallocate=False) as ray:
            if ray is None:
                raise ValueError(ray_store.MISSING)
            ray.keep_all([ray.put(dict(self._here.make(file_of(seed=-1))))])
            before = _memory()
            made = self._here.make_many(self.files)
            references = [ray.put(dict(each)) for each in made if isinstance(each, ItemFeatures)]
            held = ray.keep_all(references * (_NUM_ROLLOUTS // _NUM_PROCESSES))
            private_nbytes, shared_nbytes = _growth(before)
            self._check(held, num_times=_NUM_ROLLOUTS)
            return _Sample(private_nbytes, shared_nbytes, _median_ms(each.open_ms for each in held))

    def _check(self, held: Sequence[Held], *, num_times: int) -> None:
        if sum(each.total for each in held) != num_times * self._total:
            raise RuntimeError("the processes have other features than those that were made")


def _files(number: int) -> list[bytes]:
    return [file_of(seed=seed) for seed in range(number)]


def file_of(*, seed: int) -> bytes:
    """Return a JPEG; another one for each seed from -1."""
    file = io.BytesIO()
    photo(np.random.default_rng(seed + 1), _WIDTH, _HEIGHT).save(file, "JPEG", quality=90)
    return file.getvalue()


def _median_ms(times: Iterable[list[float]]) -> float:
    return statistics.median(value for each in times for value in each)


def _memory() -> tuple[float, float]:
    """Return the bytes of private and of shared memory of all processes below this one."""
    found = [pss_nbytes(pid) for pid in trees([os.getpid()])]
    return sum(private for private, _ in found), sum(shared for _, shared in found)


def _growth(before: tuple[float, float]) -> tuple[float, float]:
    private_nbytes, shared_nbytes = _memory()
    return private_nbytes - before[0], shared_nbytes - before[1]


class _Holder:
    """Process that keeps the features of its rollouts."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        if popen.stdin is None or popen.stdout is None:
            raise ValueError("its pipes are needed")
        self._stdin, self._stdout = popen.stdin, popen.stdout

    def send(self, images: Iterable[Any]) -> None:
        """Send images one by one, as rollouts arrive."""
        for image in images:
            pickle.dump(image, self._stdin, pickle.HIGHEST_PROTOCOL)

    def keep(self) -> Held:
        """Wait until the process has the features of all that was sent."""
        pickle.dump(None, self._stdin)
        self._stdin.flush()
        return msgspec.json.decode(self._stdout.readline(), type=Held)


@contextlib.contextmanager
def _holders(first: SharedItem | ItemFeatures) -> Iterator[list[_Holder]]:
    """Run the processes; with the first features, each has imported all that it needs."""
    command = [sys.executable, "-m", "benchmarks.rollout_holder"]
    with contextlib.ExitStack() as stack:
        holders = []
        for _ in range(_NUM_PROCESSES):
            popen = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            stack.callback(popen.kill)
            holders.append(_Holder(popen))
        for holder in holders:
            holder.send([first])
        for holder in holders:
            holder.keep()
        yield holders
