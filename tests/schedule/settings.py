"""How long the state machines run: 20,000 steps each, the same ones every time."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

NUM_STEPS = 20_000
_STEPS_PER_EXAMPLE = 100

STATE_MACHINE = settings(
    # Some more than that would be exact: a few examples end early.
    max_examples=NUM_STEPS // _STEPS_PER_EXAMPLE * 6 // 5,
    stateful_step_count=_STEPS_PER_EXAMPLE,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
