"""A circuit breaker: who fails again and again is left out until a probe has an answer. Pure."""

from __future__ import annotations

MAX_FAILURES = 3
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
"""A tier is of use again so soon after the cause of an outage has ended."""


class Breaker:
    """Closed while calls succeed. After `MAX_FAILURES` in a row it is open: nothing is asked but,
    after a pause, one probe. The pause doubles with each probe that fails.
    """

    def __init__(self) -> None:
        self.num_openings = 0
        self._num_failures = 0
        self._pause_s = 0.0
        self._probe_at_s = 0.0

    @property
    def is_open(self) -> bool:
        return self._pause_s > 0.0

    def trip(self, *, now_s: float) -> None:
        """Open it, and have it probed at once: nothing is known yet."""
        self._pause_s, self._probe_at_s = FIRST_PAUSE_S, now_s

    def succeeded(self) -> None:
        """A call, or a probe, had its answer in time."""
        self._num_failures, self._pause_s = 0, 0.0

    def failed(self, *, now_s: float) -> None:
        """One had none. While it is open only probes count: what was asked before says nothing."""
        if self.is_open:
            return
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            self.num_openings += 1
            self._pause_s = FIRST_PAUSE_S
            self._probe_at_s = now_s + self._pause_s

    def probe_failed(self, *, now_s: float) -> None:
        """The probe had no answer: the next one comes later."""
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._probe_at_s = now_s + self._pause_s

    def probe_in_s(self, *, now_s: float) -> float:
        """How long until the next probe, while it is open."""
        return max(0.0, self._probe_at_s - now_s)
