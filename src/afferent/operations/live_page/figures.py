"""Statistics of the time between two snapshots of the metrics. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from afferent.telemetry.readings import Declaration, Reading


class Change:
    """Change of all metrics between two snapshots.

    If a sum has decreased, a process has restarted, and its whole value is new.
    """

    def __init__(
        self, before: Sequence[Reading], after: Sequence[Reading], *, elapsed_s: float
    ) -> None:
        self._before = _by_name(before)
        self._after = _by_name(after)
        self._elapsed_s = max(elapsed_s, 1e-9)

    def now(self, name: str, **words: str) -> float:
        """Return the current sum of a metric's series; 0 if there is none.

        Args:
            words: Only series with these label values.
        """
        values = _total(self._after.get(name), words)
        return values[0] if values else 0.0

    def rate(self, name: str, **words: str) -> float:
        """Return the growth of a sum per second."""
        new = self._new(name, words)
        return new[0] / self._elapsed_s if new else 0.0

    def observed(self, name: str, **words: str) -> tuple[float, float]:
        """Return the number and the sum of all observations of a histogram by now."""
        values = _total(self._after.get(name), words)
        return (math.fsum(values[:-1]), values[-1]) if values else (0.0, 0.0)

    def quantile(self, part: float, name: str, **words: str) -> float | None:
        """Return a quantile of the new observations of a histogram, ``None`` without any.

        It is linear within a bucket. Observations above all bounds count as the highest bound.
        """
        new, reading = self._new(name, words), self._after.get(name)
        if reading is None or not new or sum(new[:-1]) <= 0:
            return None
        return _quantile(part, reading.metric, new[:-1])

    def _new(self, name: str, words: Mapping[str, str]) -> list[float]:
        after = _total(self._after.get(name), words)
        before = _total(self._before.get(name), words)
        is_anew = any(new < old for new, old in zip(after, before, strict=False))
        if not after or not before or is_anew:
            return after
        return [new - old for new, old in zip(after, before, strict=True)]


def _by_name(readings: Sequence[Reading]) -> dict[str, Reading]:
    return {reading.metric.name: reading for reading in readings}


def _total(reading: Reading | None, words: Mapping[str, str]) -> list[float]:
    """Return the sums of the series with these label values; empty if there is none."""
    if reading is None:
        return []
    wanted = [(reading.metric.labels.index(label), word) for label, word in words.items()]
    chosen = [
        each.values
        for each in reading.series
        if all(each.labels[index] == word for index, word in wanted)
    ]
    return [math.fsum(column) for column in zip(*chosen, strict=True)]


def _quantile(part: float, metric: Declaration, counts: Sequence[float]) -> float:
    rank, seen = part * sum(counts), 0.0
    for (low, high), number in zip(pairwise((0.0, *metric.buckets)), counts, strict=False):
        if number and seen + number >= rank:
            return low + (high - low) * (rank - seen) / number
        seen += number
    return metric.buckets[-1]
