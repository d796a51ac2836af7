"""The length of the state machine tests: reproducible, and ten times as long for chaos tests."""

from __future__ import annotations

from hypothesis import HealthCheck

from tests.examples import examples

STATE_MACHINE = examples(
    48,
    storm=480,
    stateful_step_count=100,
    suppress_health_check=list(HealthCheck),
)
