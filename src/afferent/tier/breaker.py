"""Circuit breaker: after repeated failures, no calls are made until a probe succeeds. Pure."""

from __future__ import annotations

MAX_FAILURES = 3
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
"""The longest time until a tier is used again after the cause of an outage has ended."""


class Breaker:
    """Closed while calls succeed; open after `MAX_FAILURES` failures in a row.

    While it is open, there are only probes, one after each pause. The pause doubles with each
    failed probe.

    Invariants:
        - It is open while ``_pause_s`` is positive.
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
        """Open it with an immediate probe: the state of the tier is unknown."""
        self._pause_s, self._probe_at_s = FIRST_PAUSE_S, now_s

    def succeeded(self) -> None:
        """Record a call or probe that succeeded in time."""
        self._num_failures, self._pause_s = 0, 0.0

    def failed(self, *, now_s: float) -> None:
        """Record a failed call. While open, only probes count: earlier calls are no evidence."""
        if self.is_open:
            return
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            self.num_openings += 1
            self._pause_s = FIRST_PAUSE_S
            self._probe_at_s = now_s + self._pause_s

    def probe_failed(self, *, now_s: float) -> None:
        """Record a failed probe: the next one comes later."""
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._probe_at_s = now_s + self._pause_s

    def probe_in_s(self, *, now_s: float) -> float:
        """Return the time until the next probe, while it is open."""
        return max(0.0, self._probe_at_s - now_s)
