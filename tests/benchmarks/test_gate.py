"""``make bench ARGS=gate`` measures what its record promises."""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest
from PIL import Image

from afferent.errors import ConfigError
from afferent.types import MiB
from benchmarks import gate
from benchmarks.controls.sockets import load_zmq
from benchmarks.gate_memory import Sampler
from benchmarks.gate_scenario import Scenario, choose
from benchmarks.pages import PageFiles
from benchmarks.record import Row
from benchmarks.run import BENCHMARKS

SMALL = Scenario(
    num_requests=6,
    arena_nbytes=8 * MiB,
    runs=1,
    regimes=("engine",),
    gates=("1", "4-held", "bytes", "control"),
    prefill_s={"engine": 0.2},
    page=(280, 364),
)
HEAP_NBYTES = 32 * MiB  # growth of a process's heap, even with small pages


@pytest.mark.bench
@pytest.mark.timeout(240)
def test_the_record_has_its_keys() -> None:
    assert BENCHMARKS["gate"] is gate
    steps: list[None] = []
    report = gate.measure(SMALL, lambda: steps.append(None))
    assert len(steps) == SMALL.runs * len(SMALL.gates)
    record = json.loads(report.as_json())
    assert record["benchmark"] == "gate"
    rows = {row["gate"]: row for row in record["rows"]}
    assert list(rows) == list(SMALL.gates)
    for row in rows.values():
        assert row["regime"] == "engine"
        assert set(gate.COLUMNS) <= set(row)
        assert 0 < row["requests_per_s"] <= 1 / SMALL.prefill_s["engine"]
        assert row["base_nbytes"] > 20 * MiB
        assert row["samples"]["ok"] == [SMALL.num_requests] * SMALL.runs
        assert row["samples"]["refused"] == [0] * SMALL.runs
    for growth in rows["bytes"]["samples"]["peak_growth_nbytes"]:
        assert SMALL.arena_nbytes <= growth < SMALL.arena_nbytes + 2 * HEAP_NBYTES
    # A count gate releases its permit at the engine's acceptance, so requests queue there.
    one_nbytes = SMALL.features_nbytes / SMALL.num_requests
    for growth in rows["1"]["samples"]["peak_growth_nbytes"]:
        assert 2 * one_nbytes < growth < 2 * (HEAP_NBYTES + SMALL.features_nbytes)
    # A gate that keeps permits until the end limits the memory by their number.
    held = rows["4-held"]["samples"]["peak_growth_nbytes"]
    assert all(growth < 4 * one_nbytes + 2 * HEAP_NBYTES for growth in held)
    assert "on Afferent's own architecture" in record["notes"][0]
    assert [goal["what"].partition(": ")[0] for goal in record["goals"]] == ["engine"] * 3
    assert record["goals"][0]["met"]


def test_what_is_measured_can_be_chosen() -> None:
    assert gate.num_steps(quick=True) == 2 * 3
    assert gate.num_steps(quick=False, runs=1, regimes=["balanced"], gates=["bytes"]) == 1 + 3
    full = choose(quick=False)
    assert full.num_requests == 64
    assert full.features_nbytes / 64 / 3 == pytest.approx(6.38e6, rel=0.01)
    assert full.needed_nbytes > choose(quick=False, gates=["bytes"]).needed_nbytes


def test_goals_say_what_was_missed() -> None:
    scenario = choose(quick=False)
    arena_mib = scenario.arena_nbytes / MiB

    def row(name: str, rate: float, growth_mib: float, refused: int = 0) -> Row:
        return Row(
            {"regime": "engine", "gate": name},
            {
                "requests_per_s": [rate],
                "growth_mib": [growth_mib],
                "peak_growth_nbytes": [growth_mib * MiB],
                "refused": [refused],
            },
        )

    def met(**changed: Row) -> list[bool]:
        rows = {"bytes": row("bytes", 2.4, arena_mib + 9), "control": row("control", 2.4, 3000)}
        return [goal.met for goal in gate._goals("engine", scenario, rows | changed)]

    assert met() == [True, True, True, True]
    assert met(control=row("control", 2.4, 3000, refused=1)) == [False, True, True, True]
    assert met(bytes=row("bytes", 2.4, arena_mib + 99)) == [True, False, True, True]
    assert met(bytes=row("bytes", 2.3, arena_mib + 9)) == [True, True, False, True]
    assert met(control=row("control", 2.4, 1000)) == [True, True, True, False]


def test_too_little_memory_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afferent.runtime.memory.available_nbytes", lambda: 3 * 2**30)
    with pytest.raises(ConfigError, match=r"3\.0 GiB are free; choose fewer --requests"):
        gate.run(quick=False, after_sample=lambda: None)


def test_without_pyzmq_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq.asyncio", None)
    with pytest.raises(ConfigError, match=r"\.\[bench\]"):
        load_zmq()


def test_no_two_pages_are_the_same() -> None:
    files = PageFiles(280, 364)
    pages = [files.page(number) for number in range(5)]
    assert len(set(pages)) == 5
    assert pages == [PageFiles(280, 364).page(number) for number in range(5)]
    pictures = []
    for data in pages:
        with Image.open(io.BytesIO(data)) as image:
            image.verify()
        with Image.open(io.BytesIO(data)) as image:
            assert image.format == "PNG"
            assert image.mode == "RGB"
            pictures.append(np.asarray(image))
    assert pictures[0].shape == (364, 280, 3)
    for index, picture in enumerate(pictures):
        assert all(np.any(picture != other) for other in pictures[index + 1 :])


def test_a_sampler_raises_what_its_figure_raises() -> None:
    figures = iter([3, 9])
    with pytest.raises(StopIteration), Sampler(lambda: next(figures)) as sampler:
        sampler._thread.join()  # the thread ends by itself
    assert sampler.peak == 9
