"""Measure images in front of a vLLM on a GPU, compared with vLLM's own API server.

The model has the layers of Qwen2.5-VL-3B, with random weights. Two servers share the GPU, and work
in turn: Afferent with its own vLLM, and a stock ``vllm serve``. Each request has one image, and its
answer has one token, so a request's time is its time to first token; a streamed answer has 64.
``gpu_busy`` is the part of the time in which the GPU computed, as NVML reports it.

First, the same requests go to both, one at a time; answers and log-probabilities are compared. At
last, requests of text alone go to Afferent's vLLM, directly and through Afferent.

The benchmark needs a GPU with CUDA, and vLLM in the environment that ``--python`` names.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from afferent.errors import ConfigError
from benchmarks.peers import servers
from benchmarks.peers.load import Load, Pages, bodies_of, put, put_in_vllm
from benchmarks.peers.servers import GPU, REAL, Side
from benchmarks.peers.vllm import COLUMNS as OF_VLLM
from benchmarks.peers.vllm import MEASURED, NUM_PAIRS, text_goals, text_pairs
from benchmarks.record import BusyMeter, Goal, Report, Row

QUESTION = "What do images cost in front of a vLLM on a GPU, and does the GPU wait for them?"
COLUMNS = (*OF_VLLM, "gpu_busy")

_PATH = "/v1/chat/completions"
_SIZES = {"page": (1275, 1650), "small": (640, 480)}
_CASES = (
    ("page", "misses", 1),
    ("page", "misses", 16),
    ("page", "misses", 64),
    ("page", "repeats", 16),
    ("small", "misses", 16),
    ("small", "misses", 64),
    ("small", "repeats", 16),
    ("small", "streamed", 16),
    ("small", "streamed", 64),
)
_NUM_REQUESTS = {"page": {1: 12, 16: 48, 64: 96}, "small": {16: 160, 64: 256}}
_NUM_KNOWN, _NUM_COMPARED = 16, 24
_NUM_STREAMED = 64
"""Tokens of a streamed answer."""
_SAMPLE_S = 0.05

AfterSample = Callable[[], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", type=Path, default=Path(sys.executable), help="with vLLM")
    parser.add_argument("--engine-args", default="", help="more arguments for both vLLMs")
    parser.add_argument("--rounds", type=int, default=3, help="of each case (default: 3)")


def num_steps(*, quick: bool, python: Path, engine_args: str, rounds: int) -> int:
    return 2 * (_NUM_COMPARED + len(_CASES) * (1 if quick else rounds) + _num_pairs(quick=quick))


def _num_pairs(*, quick: bool) -> int:
    return 3 if quick else NUM_PAIRS


def run(
    *, quick: bool, python: Path, engine_args: str, rounds: int, after_sample: AfterSample
) -> Report:
    """Run the benchmark.

    Raises:
        ConfigError: There is no GPU that NVML shows.
    """
    report = Report("vllm-gpu", QUESTION)
    arguments = shlex.split(engine_args)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        meter = stack.enter_context(_GpuMeter().running())
        model = servers.make_model(Path(folder), REAL, max_positions=8192, device="cuda")
        starts = (
            servers.stock("stock", python, model, *arguments, device=GPU),
            servers.afferent(python, model, *arguments, device=GPU),
        )
        with ThreadPoolExecutor() as pool:  # each takes a minute
            sides = list(pool.map(stack.enter_context, starts))
        files = {name: Pages(*size) for name, size in _SIZES.items()}
        known = {name: pages.fresh(_NUM_KNOWN) for name, pages in files.items()}
        report.notes.append(_compare(sides, files["page"].fresh(_NUM_COMPARED), after_sample))
        busy = BusyMeter()
        for name, case, c in _CASES:
            for side in sides:
                put(side, _PATH, known[name], 4)
            found: dict[str, list[tuple[Load, float]]] = {side.name: [] for side in sides}
            for number in range(1 if quick else rounds):
                for side in sides if number % 2 else reversed(sides):
                    wanted, is_new = _NUM_REQUESTS[name][c], case != "repeats"
                    if case == "streamed":
                        wanted //= 2
                    bodies = bodies_of(files[name], known[name], wanted, are_new=is_new)
                    if case == "streamed":
                        bodies = [_streamed(body) for body in bodies]
                    meter.take()
                    load = put_in_vllm(side, _PATH, bodies, c)
                    found[side.name].append((load, meter.take()))
                    after_sample()
            report.rows += [_row(side, f"{name}, {case}", c, each) for side, each in found.items()]
        pairs = text_pairs(sides[-1], report, after_sample, number=_num_pairs(quick=quick))
        report.busy_cores_elsewhere = busy.busy_cores_elsewhere()
    report.goals = [*_goals(report.rows), *text_goals(pairs)]
    report.rows += pairs
    return report


def _streamed(body: bytes) -> bytes:
    wanted = {**json.loads(body), "max_tokens": _NUM_STREAMED, "ignore_eos": True, "stream": True}
    return json.dumps(wanted).encode()


def _row(side: str, case: str, c: int, found: Sequence[tuple[Load, float]]) -> Row:
    samples = {name: [float(getattr(load, name)) for load, _ in found] for name in MEASURED}
    samples["gpu_busy"] = [busy for _, busy in found]
    return Row({"side": side, "case": case, "c": c}, samples)


def _compare(sides: Sequence[Side], bodies: Sequence[bytes], after_sample: AfterSample) -> str:
    """Ask both servers the same, one request at a time, and describe the differences."""
    num_same, most, values = 0, 0.0, set()
    for body in bodies:
        asked = {**json.loads(body), "max_tokens": 8, "logprobs": True, "ignore_eos": True}
        answers = []
        for side in sides:
            answers.append(_answer(side, asked))
            after_sample()
        (text, ours), (other_text, theirs) = answers
        num_same += text == other_text
        most = max([most, *(abs(a - b) for a, b in zip(ours, theirs, strict=True))])
        values.add(tuple(ours))
    return (
        f"{len(bodies)} pages of 8 tokens, one at a time: {num_same} texts are the same; "
        f"log-probabilities differ by at most {most:g}; {len(values)} different answers"
    )


def _answer(side: Side, body: dict[str, Any]) -> tuple[str, list[float]]:
    request = urllib.request.Request(  # noqa: S310 - the server is ours
        side.url + _PATH, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310
        (choice,) = json.load(answer)["choices"]
    return choice["message"]["content"], [each["logprob"] for each in choice["logprobs"]["content"]]


class _GpuMeter:
    """Samples of the GPU's use."""

    def __init__(self) -> None:
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError as error:
            raise ConfigError("NVML is needed: pip install nvidia-ml-py") from error
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise ConfigError(f"there is no GPU: {error}") from error
        self._device = self._nvml.nvmlDeviceGetHandleByIndex(0)
        self._samples: list[float] = []
        self._is_over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[_GpuMeter]:
        thread = threading.Thread(target=self._sample)
        thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            thread.join()

    def take(self) -> float:
        """Return the mean since the last call, and begin anew."""
        samples, self._samples = self._samples, []
        return sum(samples) / max(1, len(samples))

    def _sample(self) -> None:
        while not self._is_over.wait(_SAMPLE_S):
            rates = self._nvml.nvmlDeviceGetUtilizationRates(self._device)
            self._samples.append(rates.gpu / 100)


def _goals(rows: Sequence[Row]) -> Iterator[Goal]:
    for ours, theirs in zip(rows[1::2], rows[::2], strict=True):
        what = f"{ours.keys['case']}, c={ours.keys['c']}"
        ratio = ours.median("requests_per_s") / theirs.median("requests_per_s")
        yield Goal(f"{what}: requests_per_s / stock's >= 1", ratio >= 1, ratio)
        ratio = ours.median("cpu_ms") / theirs.median("cpu_ms")
        yield Goal(f"{what}: cpu_ms / stock's <= 0.45", ratio <= 0.45, ratio)
