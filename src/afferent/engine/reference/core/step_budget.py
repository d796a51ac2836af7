"""Work budget of a step, so that no request waits long for its next token."""

from __future__ import annotations

from typing import Final

STEP_S: Final = 0.025
"""Time for the encoder's part of a step, and for the answers' part: together 50 ms at most."""
_WEIGHT: Final = 0.2
"""Weight of the newest measurement in the mean."""


class StepBudget:
    """Units of work (rows, tokens) that take about `STEP_S`, by a moving mean of their time."""

    def __init__(self, first: int) -> None:
        """Start with ``first``, the budget before the first measurement."""
        self._first = first
        self._unit_s: float | None = None

    @property
    def num(self) -> int:
        """Units for the next step, one at least."""
        return self._first if self._unit_s is None else max(1, int(STEP_S / self._unit_s))

    def measured(self, num: int, seconds: float) -> None:
        """Record the time of so many units."""
        if num > 0:
            unit_s = max(seconds / num, 1e-9)
            before = unit_s if self._unit_s is None else self._unit_s
            self._unit_s = before + _WEIGHT * (unit_s - before)
