"""The amount of work that a step may have."""

from __future__ import annotations

import pytest

from afferent.builtin.engine.core.step_budget import STEP_S, StepBudget


def test_budget_is_the_first_one_until_something_was_measured() -> None:
    budget = StepBudget(128)
    budget.measured(0, 1.0)
    assert budget.num_within(STEP_S) == 128


@pytest.mark.parametrize("unit_s", [0.0001, 0.001, 0.01])
def test_budget_follows_the_time_of_a_unit(unit_s: float) -> None:
    budget = StepBudget(1)
    for _ in range(3):
        budget.measured(10, 10 * unit_s)
    assert budget.num_within(STEP_S) == pytest.approx(STEP_S / unit_s, abs=1)
    for _ in range(50):
        budget.measured(10, 20 * unit_s)
    assert budget.num_within(STEP_S) == pytest.approx(STEP_S / unit_s / 2, abs=1)


def test_unit_that_takes_longer_than_a_step_is_done_alone() -> None:
    budget = StepBudget(1)
    budget.measured(1, 100 * STEP_S)
    assert budget.num_within(STEP_S) == 1


def test_clock_that_does_not_move_is_no_division_by_zero() -> None:
    budget = StepBudget(1)
    budget.measured(5, 0.0)
    assert budget.num_within(STEP_S) >= 1
