"""Measure the pictures a second that become features of a Qwen2-VL.

- `fast` and `adapter`: a pool of two preprocess workers behind a store, from encoded bytes in the
  arena to sealed features there, with jobs and messages. `adapter` runs the model's own processor
  of `transformers`.
- `hf_1_thread` and `hf_2_threads`: Pillow and that processor in one process, as engines do it;
  `hf_2_processes`: the same in two.
- `decode_only`: the lower bound, in two processes.

The model's own processor has the backend that is installed: torchvision's, or the slower Pillow's.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from afferent import keys
from afferent.config import Limits
from afferent.errors import ConfigError
from afferent.media.decode.image import read_image_header
from afferent.media.families.registry import AnyFamily, describe
from afferent.media.headers.probe import ImageHeader
from afferent.media.workers.jobs import InputRange, MakeFeatures
from afferent.media.workers.launch import ENV, POOL, THREAD_ENV, PoolSettings
from afferent.runtime.process import Child
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.items import Queue, SealItem
from afferent.store.protocol.results import Failed
from afferent.types import ContentKey, CreateItem, GiB, Handle, MiB, ObjectKind, encode
from benchmarks.children import running
from benchmarks.pages import page, photo
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate

QUESTION = "How many pictures a second become features?"
COLUMNS = ("format", "width", "height", "path", "items_per_s")

_CASES = (("JPEG", 644, 364), ("JPEG", 1275, 1650), ("PNG", 644, 364), ("PNG", 1275, 1650))
_QUICK_CASES = (_CASES[0], _CASES[3])
_NUM_WORKERS = 2
_PATHS = ("fast", "adapter", "hf_1_thread", "hf_2_threads", "hf_2_processes", "decode_only")
_BURSTS = ("one_request_of_100", "100_requests_of_one")
_BURST = 100
_SAMPLE_S, _QUICK_SAMPLE_S = 0.7, 0.15
_START_TIMEOUT_S = 120.0
_ARENA_NBYTES = GiB
_SHARES = {ObjectKind.RAW: 0.1, ObjectKind.FEATURES: 0.9}
_GOAL_ADAPTER, _GOAL_FAST, _GOAL_BURST, _GOAL_FIRST = 0.9, 3.0, 0.15, 0.1

AfterSample = Callable[[], None]
Case = tuple[str, int, int]


def num_steps(*, quick: bool) -> int:
    per_case = len(_PATHS) + (0 if quick else len(_BURSTS))
    return len(_cases(quick=quick)) * per_case * (MIN_SAMPLES + 1)


def _cases(*, quick: bool) -> Sequence[Case]:
    return _QUICK_CASES if quick else _CASES


def run(*, quick: bool, after_sample: AfterSample) -> Report:
    report = Report("preprocess", QUESTION)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        write_model(folder)
        bench = _Bench(folder, stack, sample_s=_QUICK_SAMPLE_S if quick else _SAMPLE_S)
        meter = BusyMeter()
        for case in _cases(quick=quick):
            rows = bench.rates(case, after_sample)
            if not quick:
                rows += bench.bursts(case, after_sample)
            report.rows += rows
            report.goals += _goals(case, rows)
        report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    report.notes.append(backend_of_processor())
    return report


def backend_of_processor() -> str:
    """Return a record's note about the speed of the model's own processor."""
    backend = "torchvision" if find_spec("torchvision") else "Pillow, as torchvision is missing"
    return f"backend of the model's own processor: {backend}"


def _goals(case: Case, rows: list[Row]) -> list[Goal]:
    found = {row.keys["path"]: row for row in rows}
    rates = {path: row.median("items_per_s") for path, row in found.items()}
    where = f"{case[0]} {case[1]} x {case[2]}"
    adapter = rates["adapter"] / rates["hf_2_processes"]
    fast = rates["fast"] / rates["hf_1_thread"]
    goals = [
        Goal(
            f"{where}: adapter >= {_GOAL_ADAPTER} of two bare processes",
            adapter >= _GOAL_ADAPTER,
            adapter,
        ),
        Goal(f"{where}: fast >= {_GOAL_FAST:g} times hf_1_thread", fast >= _GOAL_FAST, fast),
    ]
    if _BURSTS[0] in rates:
        one, many = (rates[path] for path in _BURSTS)
        apart = abs(one / many - 1)
        first = found[_BURSTS[0]].median("first_share")
        goals += [
            Goal(
                f"{where}: one request of {_BURST} within {_GOAL_BURST:.0%} of {_BURST} of one",
                apart <= _GOAL_BURST,
                apart,
            ),
            Goal(
                f"{where}: its first features within {_GOAL_FIRST:.0%} of its time",
                first <= _GOAL_FIRST,
                first,
            ),
        ]
    return goals


@dataclass(slots=True)
class _Bench:
    """The processes under test, started once."""

    folder: Path
    stack: contextlib.ExitStack
    sample_s: float
    _pools: dict[str, _Pool] = field(default_factory=dict)
    _bare: dict[str, list[subprocess.Popen[str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path, mode, threads, processes in (
            ("hf_1_thread", "hf", 1, 1),
            ("hf_2_threads", "hf", 2, 1),
            ("hf_2_processes", "hf", 1, 2),
            ("decode_only", "decode", 1, 2),
        ):
            self._bare[path] = [
                self.stack.enter_context(_bare(mode, threads, self.folder))
                for _ in range(processes)
            ]
        for path, is_reference in (("fast", False), ("adapter", True)):
            family = describe(self.folder, reference=is_reference)
            if family is None:
                raise ConfigError("the benchmark's model is not known")
            self._pools[path] = self.stack.enter_context(_pool(family))

    def rates(self, case: Case, after_sample: AfterSample) -> list[Row]:
        """Measure each path alone, in turn."""
        with _files(self.folder, case) as files, contextlib.ExitStack() as stack:
            sides: dict[str, Callable[[int], float]] = {}
            for path, made in self._pools.items():
                stack.enter_context(made.pictures(files))
                sides[path] = made.run_one_request
            for path, bare in self._bare.items():
                sides[path] = functools.partial(_run_bare, bare, files)
            timed = {path: self._timed(side) for path, side in sides.items()}
            samples = alternate(timed, num_samples=MIN_SAMPLES, after_sample=after_sample)
        return [_row(case, path, {"items_per_s": values}) for path, values in samples.items()]

    def _timed(self, side: Callable[[int], float]) -> Callable[[], float]:
        """Return a function that measures items a second, for about one sample's time."""
        side(2)
        number = max(2, round(self.sample_s * 4 / max(side(4), 1e-6)))
        return lambda: number / side(number)

    def bursts(self, case: Case, after_sample: AfterSample) -> list[Row]:
        """Measure the same hundred pictures as one request, and as a hundred."""
        made, first_shares = self._pools["fast"], []

        def one_request() -> float:
            seconds = made.run_one_request(_BURST)
            first_shares.append(made.first_s / seconds)
            return _BURST / seconds

        sides = {
            _BURSTS[0]: one_request,
            _BURSTS[1]: lambda: _BURST / made.run_many_requests(_BURST),
        }
        with _files(self.folder, case) as files, made.pictures(files):
            samples = alternate(sides, num_samples=MIN_SAMPLES, after_sample=after_sample)
        one = {"items_per_s": samples[_BURSTS[0]], "first_share": first_shares[1:]}
        return [
            _row(case, _BURSTS[0], one),
            _row(case, _BURSTS[1], {"items_per_s": samples[_BURSTS[1]]}),
        ]


def _row(case: Case, path: str, samples: dict[str, list[float]]) -> Row:
    format, width, height = case
    return Row({"format": format, "width": width, "height": height, "path": path}, samples)


class _Pool:
    """Two workers behind a store, and a frontend's connection to it."""

    def __init__(self, address: str, family: AnyFamily) -> None:
        self._family = family
        self._loop = asyncio.new_event_loop()
        connecting = AsyncDaemonStore.connect(address, name="bench", writable=True)
        self._store: AsyncDaemonStore = self._loop.run_until_complete(connecting)
        self._numbers = itertools.count()
        self._raw: list[tuple[Handle, ImageHeader]] = []
        self.first_s = 0.0

    def close(self) -> None:
        self._loop.run_until_complete(self._store.close())
        self._loop.close()

    @contextlib.contextmanager
    def pictures(self, files: Sequence[Path]) -> Iterator[None]:
        """Write the pictures into the arena, as after an upload."""
        for path in files:
            data = path.read_bytes()
            header = read_image_header(data, Limits())
            self._raw.append((self._loop.run_until_complete(self._write(data)), header))
        yield
        self._raw.clear()
        self._loop.run_until_complete(self._store.release("raw"))

    async def _write(self, data: bytes) -> Handle:
        item = CreateItem(ObjectKind.RAW, len(data))
        (handle,) = await self._store.create("raw", [item])
        target = np.frombuffer(self._store.block(handle), np.uint8)
        np.copyto(target, np.frombuffer(data, np.uint8))
        (sealed,) = await self._store.seal("raw", [SealItem(handle, len(data))])
        return sealed

    def run_one_request(self, number: int) -> float:
        """Return the seconds until all features are sealed; `first_s` is the time of the first."""
        start = time.perf_counter()
        self._loop.run_until_complete(self._request("one", self._items(number)))
        return time.perf_counter() - start

    def run_many_requests(self, number: int) -> float:
        start = time.perf_counter()
        self._loop.run_until_complete(self._requests(self._items(number)))
        return time.perf_counter() - start

    async def _requests(self, items: list[Queue]) -> None:
        await asyncio.gather(*(self._request(f"r{n}", [item]) for n, item in enumerate(items)))

    async def _request(self, name: str, items: list[Queue]) -> None:
        start = time.perf_counter()
        step = max(1, _ARENA_NBYTES // 3 // items[0].nbytes)  # surely small enough for the arena
        for at in range(0, len(items), step):
            part = items[at : at + step]
            await self._store.acquire(name, part)
            outcomes = await self._store.wait(name, [part[0].key])
            if at == 0:
                self.first_s = time.perf_counter() - start
            if part[1:]:
                outcomes += await self._store.wait(name, [item.key for item in part[1:]])
            if any(isinstance(outcome, Failed) for outcome in outcomes):
                raise ConfigError("a picture of the benchmark was refused")
            await self._store.release(name)

    def _items(self, number: int) -> list[Queue]:
        """Return new items, all with different keys."""
        items = []
        for index in range(number):
            raw, header = self._raw[index % len(self._raw)]
            plan = self._family.plan(header)
            if plan is None:
                raise ConfigError("the family of the benchmark can't plan")
            key = ContentKey(keys.frame(b"bench", next(self._numbers).to_bytes(8, "little")))
            job = encode(MakeFeatures(header, InputRange(0, raw.nbytes)))
            items.append(Queue(key, ObjectKind.FEATURES, plan.nbytes, [raw], job))
        return items


@contextlib.contextmanager
def _pool(family: AnyFamily) -> Iterator[_Pool]:
    with StoreServer(_ARENA_NBYTES, shares=_SHARES) as server, workers(server.address, family):
        made = _Pool(server.address, family)
        yield made
        made.close()


def workers(address: str, family: AnyFamily) -> contextlib.AbstractContextManager[Child]:
    """Run two preprocess workers of a store; wait until they are ready."""
    settings = PoolSettings(
        store_address=address,
        family=family,
        limits=Limits(),
        num_workers=_NUM_WORKERS,
        item_timeout_s=60.0,
        memory_nbytes=512 * MiB,
    )
    return running("preprocess", POOL, settings, env=ENV)


# The other sides


@contextlib.contextmanager
def _bare(mode: str, num_threads: int, folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.bare", mode, str(num_threads), str(folder)]
    env = {**os.environ, **THREAD_ENV, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env=env,
    ) as child:
        if _line(child) != "ready":
            raise ConfigError("a bare process of the benchmark did not start")
        yield child
        child.kill()


def _run_bare(
    children: Sequence[subprocess.Popen[str]], files: Sequence[Path], number: int
) -> float:
    """Return the seconds until all processes are done."""
    start = time.perf_counter()
    for index, child in enumerate(children):
        share = number // len(children) + (index < number % len(children))
        if child.stdin is not None:
            child.stdin.write(" ".join([str(share), *map(str, files)]) + "\n")
    for child in children:
        _line(child)
    return time.perf_counter() - start


def _line(child: subprocess.Popen[str]) -> str:
    return child.stdout.readline().strip() if child.stdout is not None else ""


# The inputs


def write_model(folder: Path) -> None:
    """Write the part of a Qwen2-VL's folder with the settings of the processor: the defaults."""
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_vl", **_TOKENS}))
    processor = {"image_processor_type": "Qwen2VLImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


_TOKENS = {"image_token_id": 151655, "video_token_id": 151656}


@contextlib.contextmanager
def _files(folder: Path, case: Case, *, number: int = 8) -> Iterator[list[Path]]:
    format, width, height = case
    rng = np.random.default_rng(0)
    paths = []
    for index in range(number):
        draw = page if height > width else photo
        path = folder / f"{index}.{format.lower()}"
        draw(rng, width, height).save(path, format, quality=85)
        paths.append(path)
    yield paths
    for path in paths:
        path.unlink()
