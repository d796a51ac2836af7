"""``make bench-ray NAME=rollout_nodes`` counts the bytes between two nodes."""

from __future__ import annotations

import os

import pytest

from benchmarks import rollout_nodes
from benchmarks.run import BENCHMARKS

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace needs root")
def test_features_do_not_pass_the_link() -> None:
    assert BENCHMARKS["rollout_nodes"] is rollout_nodes
    steps: list[None] = []
    report = rollout_nodes.run(quick=True, after_sample=lambda: steps.append(None))
    assert len(steps) == rollout_nodes.num_steps(quick=True)
    ratios = {row.keys["side"]: row.median("of_features") for row in report.rows}
    assert ratios["afferent"] < 0.2
    assert 1 <= ratios["ray"] < 1.2
    assert ratios["value"] > rollout_nodes._NUM_ROLLOUTS
