"""Measure the bytes that the images of rollouts take between two nodes.

The images are here, and eight of their sixteen rollouts on another node, in four training
processes, which read all features. Ray has a node at each end of a link; all bytes of the link
count, those of Ray's own messages included.

- `afferent`: a rollout has a `SharedItem` and Ray's reference to the image's file. The workers of
  the other node make the features of it, once for all its processes.
- `ray`: a rollout has the reference that `ray.put` returned for the features.
- `value`: a rollout has the features themselves.

``of_files`` and ``of_features`` are the bytes in those of the distinct files and features.

It needs Ray and a network namespace (``make bench-ray NAME=rollout_nodes``, as root).
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from afferent import Features, ItemFeatures, MiB, SharedItem
from afferent.errors import ConfigError
from afferent.ray import NodeStores
from benchmarks.link import Link, link
from benchmarks.peers import ray_store
from benchmarks.peers.ray_nodes import RayNodes, ray_nodes
from benchmarks.preprocess import write_model
from benchmarks.record import BusyMeter, Goal, Report, Row
from benchmarks.rollout_holder import total_of
from benchmarks.rollouts import file_of

QUESTION = "How many bytes do the images of rollouts take between two nodes?"
COLUMNS = ("side", "sent_mib", "of_files", "of_features")

_NUM_IMAGES, _QUICK_NUM_IMAGES = 128, 16
_NUM_ROUNDS, _QUICK_NUM_ROUNDS = 3, 1
_NUM_PROCESSES: Final = 4
_NUM_ROLLOUTS: Final = 8
_MAX_RATIO: Final = 1.1
_ARENA_NBYTES = 256 * MiB
_SIDES: Final = ("afferent", "ray", "value")


def num_steps(*, quick: bool) -> int:
    return len(_SIDES) * (_QUICK_NUM_ROUNDS if quick else _NUM_ROUNDS)


def run(*, quick: bool, after_sample: Callable[[], None]) -> Report:
    if not ray_store.is_installed():
        raise ConfigError(ray_store.MISSING)
    report = Report("rollout_nodes", QUESTION)
    meter = BusyMeter()
    number = _QUICK_NUM_IMAGES if quick else _NUM_IMAGES
    num_rounds = _QUICK_NUM_ROUNDS if quick else _NUM_ROUNDS
    sent: dict[str, list[int]] = {side: [] for side in _SIDES}
    with tempfile.TemporaryDirectory() as name, link() as net, ray_nodes(net) as nodes:
        if nodes is None:
            raise ConfigError(ray_store.MISSING)
        write_model(Path(name))
        measured = _Measured(Path(name), net, nodes)
        for index in range(num_rounds):
            files = [file_of(seed=index * number + seed) for seed in range(number)]
            made = measured.made(files)
            sent["afferent"].append(measured.afferent(files, made))
            after_sample()
            sent["ray"].append(measured.ray(made))
            after_sample()
            sent["value"].append(measured.value(made))
            after_sample()
        files_nbytes = sum(map(len, files))
        features_nbytes = sum(each.nbytes for each in made)
        measured.end()
    for side, found in sent.items():
        columns = {
            "sent_mib": [each / MiB for each in found],
            "of_files": [each / files_nbytes for each in found],
            "of_features": [each / features_nbytes for each in found],
        }
        report.rows.append(Row({"side": side}, columns))
    ours = report.rows[0]
    ratio = ours.median("of_features")
    report.goals = [
        Goal(f"bytes sent <= {_MAX_RATIO:g} of the features", ratio <= _MAX_RATIO, ratio)
    ]
    report.notes.append(
        f"{number} images of 640 x 480: {files_nbytes / MiB:.1f} MiB of files, "
        f"{features_nbytes / MiB:.1f} MiB of features; {_NUM_ROLLOUTS} rollouts of each on the "
        f"other node, in {_NUM_PROCESSES} processes"
    )
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    return report


class _Trainer:
    """Training process on the other node; each method returns the sum of all features."""

    def __init__(self, stores: NodeStores) -> None:
        self._features = stores.features()
        self._ray: Any = importlib.import_module("ray")

    def open_all(self, rollouts: Sequence[tuple[SharedItem, Any]]) -> int:
        found = (self._features.open(item, self._ray.get(file)) for item, file in rollouts)
        return sum(map(total_of, found))

    def get_all(self, references: Sequence[Any]) -> int:
        return sum(total_of(self._ray.get(each)) for each in references)

    def read_all(self, rollouts: Sequence[dict[str, Any]]) -> int:
        return sum(map(total_of, rollouts))


class _Measured:
    """Sides of the comparison; each returns the bytes that passed the link."""

    def __init__(self, folder: Path, net: Link, nodes: RayNodes) -> None:
        self._net, self._nodes = net, nodes
        self._here = Features(folder)
        self._stores = NodeStores(folder, num_workers=1, arena_nbytes=_ARENA_NBYTES)
        self._shared = self._stores.features()
        self._trainers = [nodes.actor_there(_Trainer, self._stores) for _ in range(_NUM_PROCESSES)]
        first = file_of(seed=-1)
        made = self.made([first])
        self.afferent([first], made)
        self.ray(made)

    def made(self, files: Sequence[bytes]) -> list[ItemFeatures]:
        """Make features here."""
        made = list(self._here.make_many(files))
        return [each for each in made if isinstance(each, ItemFeatures)]

    def afferent(self, files: Sequence[bytes], made: Sequence[ItemFeatures]) -> int:
        items = list(self._shared.share_many(files))
        references = [self._nodes.put(file) for file in files]
        rollouts = list(zip(items, references, strict=True))
        return self._sent("open_all", rollouts, made)

    def ray(self, made: Sequence[ItemFeatures]) -> int:
        return self._sent("get_all", [self._nodes.put(dict(each)) for each in made], made)

    def value(self, made: Sequence[ItemFeatures]) -> int:
        return self._sent("read_all", [dict(each) for each in made], made)

    def end(self) -> None:
        self._stores.end()

    def _sent(self, method: str, rollouts: Sequence[Any], made: Sequence[ItemFeatures]) -> int:
        """Send the rollouts to the trainers, one by one, as they arrive."""
        before = self._net.num_sent()
        calls = [
            getattr(trainer, method).remote([rollout])
            for rollout in rollouts
            for _ in range(_NUM_ROLLOUTS // _NUM_PROCESSES)
            for trainer in self._trainers
        ]
        total = sum(self._nodes.get(calls))
        if total != _NUM_ROLLOUTS * sum(map(total_of, made)):
            raise RuntimeError("the trainers have other features than those that were made")
        return self._net.num_sent() - before
