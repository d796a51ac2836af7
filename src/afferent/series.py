"""What a metric is, and the series that one process counts of it.

This needs no library: the store adds up what all processes have counted, and a frontend writes the
sums in Prometheus' form. Labels are words from fixed lists: never a URL, a hash or anything else
that a client chooses; any other word is counted as ``other``.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, Struct

OTHER = "other"


class Sample(Struct, array_like=True, forbid_unknown_fields=True):
    """One series: of a histogram, the number in each bucket, the number above all of them, and the
    sum of what was observed; of any other metric, one value.
    """

    name: Annotated[str, Meta(max_length=64)]
    labels: Annotated[list[Annotated[str, Meta(max_length=64)]], Meta(max_length=8)]
    values: Annotated[list[float], Meta(max_length=64)]


@dataclass(frozen=True, slots=True)
class Label:
    name: str
    words: frozenset[str]


@dataclass(frozen=True, slots=True)
class Metric:
    """``buckets`` are the upper bounds of a histogram's."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def is_cumulative(self) -> bool:
        """Whether it only grows; a gauge says how things are now."""
        return self.kind != "gauge"

    @property
    def num_values(self) -> int:
        return len(self.buckets) + 2 if self.kind == "histogram" else 1

    def accepts(self, sample: Sample) -> bool:
        """Whether a sample can be one of this metric's."""
        return (
            len(sample.values) == self.num_values
            and len(sample.labels) == len(self.labels)
            and all(
                word in label.words or word == OTHER
                for label, word in zip(self.labels, sample.labels, strict=True)
            )
        )


class Series:
    """One metric with one word for each of its labels."""

    __slots__ = ("_buckets", "_values")

    def __init__(self, metric: Metric) -> None:
        self._buckets = metric.buckets
        self._values = [0.0] * metric.num_values

    def inc(self, amount: float = 1.0) -> None:
        self._values[0] += amount

    def set(self, value: float) -> None:
        self._values[0] = value

    def observe(self, value: float) -> None:
        """Of a histogram."""
        self._values[bisect_left(self._buckets, value)] += 1.0
        self._values[-1] += value

    @contextlib.contextmanager
    def track_inprogress(self) -> Iterator[None]:
        """Of a gauge: one more while the block runs."""
        self.inc()
        try:
            yield
        finally:
            self.inc(-1.0)

    def values(self) -> list[float]:
        return list(self._values)


class Counted:
    """What this process has counted of one metric."""

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._series: dict[tuple[str, ...], Series] = {}
        if not metric.labels:  # shown from the beginning
            self.labels()

    def labels(self, *words: str) -> Series:
        """The series of these words, in the order in which the metric names its labels."""
        found = self._series.get(words)
        if found is None:
            labels = zip(self.metric.labels, words, strict=True)
            known = tuple(str(word) if word in label.words else OTHER for label, word in labels)
            found = self._series.setdefault(known, Series(self.metric))
        return found

    def samples(self) -> Iterator[Sample]:
        for words, series in self._series.items():
            yield Sample(self.metric.name, list(words), series.values())
