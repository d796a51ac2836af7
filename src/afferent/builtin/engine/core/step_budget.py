"""Bound on the work of a step, so that no request waits long for its next token."""

from __future__ import annotations

from typing import Final

STEP_S: Final = 0.025
"""For the encoder's part of a step, and for the answers' part: together they take 50 ms at most."""
ALONE_S: Final = 0.05
"""For the encoder's part of a step while one request is served."""
_WEIGHT: Final = 0.2
"""Of the newest measurement in the mean."""


class StepBudget:
    """Speed of one kind of work (rows, tokens), by a moving mean of the time of a unit."""

    def __init__(self, first: int) -> None:
        """``first``: units of a step before the first measurement."""
        self._first = first
        self._unit_s: float | None = None

    def num_within(self, seconds: float) -> int:
        """Return the units that are expected to take so long, one at least."""
        return self._first if self._unit_s is None else max(1, int(seconds / self._unit_s))

    def measured(self, num: int, seconds: float) -> None:
        """Record the time that so many units took."""
        if num > 0:
            unit_s = max(seconds / num, 1e-9)
            before = unit_s if self._unit_s is None else self._unit_s
            self._unit_s = before + _WEIGHT * (unit_s - before)
