"""Measure an offline vLLM that is asked about many images in one call of ``LLM.chat``.

- `stock`: `vllm.LLM`, which gets the images as ``data:`` URLs.
- `best`: the same without its cache, as all images are new, and with images that two threads have
  decoded before the call, which counts. (With the cache in shared memory, vLLM's engine died in two
  of three runs.)
- `afferent`: `afferent.vllm.LLM` with two workers; ``data:`` URLs.

All three have the same model, the same arguments and the same cores, and are asked about the same
images, new ones in each round; their answers have to be equal. ``wall_s`` is the time of the call,
``cpu_ms`` the processor time of all processes for each image.

Then the engine only waits: `waiting` is `afferent.vllm.LLM` with an engine that takes ``wait_ms``
for each request, one after another. ``pool_s`` is the time of its images alone, with both workers,
``engine_s`` that of its engine alone, and ``ratio`` compares ``wall_s`` with the larger one. All
have arenas of the same size. The goals have the geometric mean of the ratios.

It needs an environment with vLLM (``make setup-vllm``).
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec

from afferent.errors import ConfigError
from benchmarks.batch_job import write_jpegs
from benchmarks.before import interval
from benchmarks.children import command, cpu_s
from benchmarks.gate_memory import trees
from benchmarks.peers import servers
from benchmarks.peers.offline_host import MARK, Done
from benchmarks.record import BusyMeter, Goal, Report, Row
from tools import vllm_env

QUESTION = "How long does an offline vLLM take for many images?"
COLUMNS = (
    *("side", "wait_ms", "images", "wall_s", "cpu_ms"),
    *("pool_s", "engine_s", "ratio"),
)

_SIDES: Final = ("stock", "best", "afferent")
_WAITS_MS: Final = (1.0, 2.0, 4.0)
_NUM_IMAGES, _QUICK_NUM_IMAGES = 500, 40
_NUM_ROUNDS, _QUICK_NUM_ROUNDS = 7, 1
_NUM_WARM: Final = 8
_NUM_LINES: Final = 30
_MAX_RATIO: Final = 1.1
_ROOT: Final = Path(__file__).parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--python", type=Path, default=vllm_env.python_of(vllm_env.FOLDER), help="with vLLM"
    )


def num_steps(*, quick: bool, python: Path) -> int:
    return (len(_SIDES) + 3 * len(_WAITS_MS)) * _num_rounds(quick=quick)


def _num_rounds(*, quick: bool) -> int:
    return _QUICK_NUM_ROUNDS if quick else _NUM_ROUNDS


def run(*, quick: bool, python: Path, after_sample: Callable[[], None]) -> Report:
    if not python.exists():
        raise ConfigError(f"{python} is not there: make setup-vllm")
    report = Report("offline", QUESTION)
    number = _QUICK_NUM_IMAGES if quick else _NUM_IMAGES
    num_rounds = _num_rounds(quick=quick)
    busy: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        model = str(servers.make_model(Path(name)))
        folder = write_jpegs(Path(name, "jpegs"), _NUM_WARM + number * num_rounds)
        paths = [str(path) for path in sorted(folder.iterdir())]
        warm, rest = paths[:_NUM_WARM], paths[_NUM_WARM:]
        rounds = [rest[start : start + number] for start in range(0, len(rest), number)]
        with ExitStack() as stack:
            hosts = {side: stack.enter_context(_host(python, side, model)) for side in _SIDES}
            meter = BusyMeter()  # read before its processes end
            samples = _in_turn(hosts, warm, rounds, after_sample)
            busy.append(meter.busy_cores_elsewhere())
        for side, found in samples.items():
            columns = {
                "wall_s": [each.wall_s for each in found],
                "cpu_ms": [each.cpu_s / number * 1e3 for each in found],
            }
            report.rows.append(Row({"side": side, "images": number}, columns))
        for wait_ms in _WAITS_MS:
            with ExitStack() as stack:
                hosts = {
                    side: stack.enter_context(_host(python, side, model, str(wait_ms)))
                    for side in ("waiting", "pool_only", "engine_only")
                }
                meter = BusyMeter()
                samples = _in_turn(hosts, warm, rounds, after_sample)
                busy.append(meter.busy_cores_elsewhere())
            report.rows.append(_waiting_row(samples, number, wait_ms))
    wall_s = {row.keys["side"]: row.median("wall_s") for row in report.rows[: len(_SIDES)]}
    for side in _SIDES[:-1]:
        ratio = wall_s[side] / wall_s["afferent"]
        report.goals.append(Goal(f"wall_s of {side} / afferent > 1", ratio > 1, ratio))
    for row in report.rows[len(_SIDES) :]:
        ratio, low, high = interval(row.samples["ratio"])
        what = (
            f"{row.keys['wait_ms']:g} ms: at most {_MAX_RATIO:g} of the longer part"
            f" (95 %: {low:.2f}..{high:.2f})"
        )
        report.goals.append(Goal(what, ratio <= _MAX_RATIO, ratio))
    report.busy_cores_elsewhere = max(busy)
    return report


class _Sample(msgspec.Struct, frozen=True):
    wall_s: float
    cpu_s: float
    answers: str


def _waiting_row(samples: dict[str, list[_Sample]], number: int, wait_ms: float) -> Row:
    wall_s, pool_s, engine_s = (
        [each.wall_s for each in samples[side]] for side in ("waiting", "pool_only", "engine_only")
    )
    columns = {
        "wall_s": wall_s,
        "pool_s": pool_s,
        "engine_s": engine_s,
        "cpu_ms": [each.cpu_s / number * 1e3 for each in samples["waiting"]],
        "ratio": [
            wall / max(pool, engine)
            for wall, pool, engine in zip(wall_s, pool_s, engine_s, strict=True)
        ],
    }
    return Row({"side": "waiting", "images": number, "wait_ms": wait_ms}, columns)


class _Host:
    """Process of one side."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        if popen.stdin is None or popen.stdout is None:
            raise ValueError("its pipes are needed")
        self._pid, self._stdin, self._stdout = popen.pid, popen.stdin, popen.stdout
        self._last_lines: deque[str] = deque(maxlen=_NUM_LINES)

    def wait_ready(self) -> None:
        self._line()

    def ask(self, paths: Sequence[str]) -> _Sample:
        before_s = self._cpu_s()
        self._stdin.write(msgspec.json.encode(paths) + b"\n")
        self._stdin.flush()
        done = msgspec.json.decode(self._line(), type=Done)
        return _Sample(done.wall_s, self._cpu_s() - before_s, done.answers)

    def close(self) -> None:
        self._stdin.close()

    def _cpu_s(self) -> float:
        return sum(map(cpu_s, trees([self._pid])))

    def _line(self) -> bytes:
        mark = MARK.strip().encode()
        for line in self._stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
            self._last_lines.append(line.decode(errors="replace"))
        raise ConfigError(f"a side ended: {''.join(self._last_lines)}")


@contextmanager
def _host(python: Path, side: str, *arguments: str) -> Iterator[_Host]:
    line = [str(python), "-m", "benchmarks.peers.offline_host", side, *arguments]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with command(line, env=vllm_env.ENV, cwd=_ROOT, **streams) as popen:
        host = _Host(popen)
        try:
            host.wait_ready()
            yield host
        finally:
            host.close()


def _in_turn(
    hosts: dict[str, _Host],
    warm: Sequence[str],
    rounds: Sequence[Sequence[str]],
    after_sample: Callable[[], None],
) -> dict[str, list[_Sample]]:
    """Ask all hosts about the images of each round; their answers are equal."""
    for host in hosts.values():
        host.ask(warm)
    samples: dict[str, list[_Sample]] = {side: [] for side in hosts}
    for paths in rounds:
        for side, host in hosts.items():
            samples[side].append(host.ask(paths))
            after_sample()
        if "stock" in hosts and len({found[-1].answers for found in samples.values()}) != 1:
            raise RuntimeError("the sides have different answers")
    return samples
