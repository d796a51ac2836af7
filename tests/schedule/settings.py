"""How long the state machines run: the same steps every time, and ten times as many in storms."""

from __future__ import annotations

from hypothesis import HealthCheck

from tests.examples import examples

STATE_MACHINE = examples(
    48,
    storm=480,
    stateful_step_count=100,
    suppress_health_check=list(HealthCheck),
)
