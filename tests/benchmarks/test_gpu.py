"""``make bench ARGS=gpu`` reports a missing GPU, without an earlier import of torch."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from afferent.errors import ConfigError
from benchmarks import gpu
from benchmarks.record import MIN_SAMPLES, Row
from benchmarks.run import BENCHMARKS

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.bench
@needs_none
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ConfigError, match="needs a GPU"):
        gpu.run(quick=True, after_sample=lambda: None)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", "gpu", "--quick"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode != 0
    assert "needs a GPU with CUDA" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_torch_it_says_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"\[engine\]"):
        gpu.run(quick=True, after_sample=lambda: None)


def test_goals_are_judged_at_the_largest_size() -> None:
    values = {side: 10.0 if side.endswith("gbps") else 0.5 for side in gpu._SIDES}
    samples = {side: [value] * MIN_SAMPLES for side, value in values.items()}
    assert [goal.met for goal in gpu._goals(Row({"nbytes": 100}, samples))] == [True, False]
    samples["locked_gbps"], samples["locked_idle"] = [8.9], [0.1]
    assert [goal.met for goal in gpu._goals(Row({"nbytes": 100}, samples))] == [False, True]


class PretendedCuda:
    """A stand-in for the used part of ``torch.cuda``, which works on the CPU."""

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.at_s = 0.0

        def record(self) -> None:
            self.at_s = time.perf_counter()

        def elapsed_time(self, end: PretendedCuda.Event) -> float:
            return (end.at_s - self.at_s) * 1e3

    class Stream:
        def wait_event(self, event: PretendedCuda.Event) -> None:
            assert event.at_s > 0, "it would wait for what was never recorded"

    def stream(self, stream: PretendedCuda.Stream) -> Any:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        pass


class PretendedTorch:
    cuda = PretendedCuda()
    mm = staticmethod(torch.mm)

    def ones(self, *sides: int, device: str) -> torch.Tensor:
        return torch.ones(8, 8)

    def empty_like(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        return torch.empty_like(tensor)


@needs_none
def test_each_way_copies_and_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
    arena: Any = None  # nothing to lock without a GPU
    case = gpu._Case(PretendedTorch(), arena, torch.arange(100_000, dtype=torch.uint8))
    for way in gpu._WAYS:
        for target in case._targets:
            target.zero_()
        assert case.gbps(way) > 0
        assert 0 <= case.idle(way) < 1
        assert all(torch.equal(target, case._sources[way]) for target in case._targets)


@needs_gpu
def test_the_record_has_its_keys() -> None:
    assert BENCHMARKS["gpu"] is gpu
    samples: list[None] = []
    report = gpu.run(quick=True, after_sample=lambda: samples.append(None))
    assert len(samples) == gpu.num_steps(quick=True)
    for row in json.loads(report.as_json())["rows"]:
        assert set(gpu.COLUMNS) <= set(row)
        assert all(row[f"{way}_gbps"] > 0 for way in gpu._WAYS)
        assert all(0 <= row[f"{way}_idle"] < 1 for way in gpu._WAYS)
