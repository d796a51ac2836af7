"""Registry of metrics: the module that counts a metric declares it, for the whole process.

    ITEMS = counter("afferent_items_total", "Media items, by outcome", outcome=("hit", "failed"))
    ...
    ITEMS.labels("hit").inc()

The values of a label are from a list: never a URL, a hash or anything else that a client chooses.
Any other value is counted as ``other``, so that no client can create series. A list may be a set
that grows while modules are imported, or an object with ``__contains__``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final, Generic, Literal, TypeVar

from afferent.telemetry.readings import OTHER, Declaration, Kind, Reading, Series

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Buckets for durations of up to minutes; the other lists are for shorter ones."""
WAIT_SECONDS = (0.001, *SECONDS[1:])
SHORT_SECONDS = (0.0001, 0.0005, 0.001, 0.005, *SECONDS[1:])


_MOST_ZEROS: Final[Mapping[Kind, int]] = {"counter": 768, "gauge": 0, "histogram": 10}
"""Largest number of series shown before they are counted; a histogram's is many lines."""


class _Cell:
    """Counts of one combination of label values."""

    __slots__ = ("_buckets", "_values")

    def __init__(self, metric: Declaration) -> None:
        self._buckets = metric.buckets
        self._values = [0.0] * metric.num_values

    @property
    def values(self) -> list[float]:
        return list(self._values)

    def reset(self) -> None:
        self._values[:] = [0.0] * len(self._values)


class CounterCell(_Cell):
    __slots__ = ()

    def inc(self, amount: float = 1.0) -> None:
        self._values[0] += amount


class GaugeCell(_Cell):
    __slots__ = ()

    def set(self, value: float) -> None:
        self._values[0] = value

    @contextlib.contextmanager
    def track(self) -> Iterator[None]:
        """Add 1 while the block runs."""
        self._values[0] += 1.0
        try:
            yield
        finally:
            self._values[0] -= 1.0


class HistogramCell(_Cell):
    __slots__ = ()

    def observe(self, value: float, *, times: int = 1) -> None:
        self._values[bisect_left(self._buckets, value)] += times
        self._values[-1] += value * times


Cell = TypeVar("Cell", bound=_Cell)
Source = TypeVar("Source")
Word = TypeVar("Word", bound=str)


class Labels:
    """Allowed values of each label of a metric."""

    def __init__(self, words: Mapping[str, Container[str]]) -> None:
        self.names = tuple(words)
        self._words = tuple(words.values())

    def known(self, words: Sequence[str]) -> tuple[str, ...]:
        """Return the values in the order of the labels, with ``other`` for unlisted ones."""
        pairs = zip(self._words, words, strict=True)
        return tuple(str(word) if word in known else OTHER for known, word in pairs)

    def all(self, most: int) -> list[tuple[str, ...]]:
        """Return all combinations of values, at most ``most``.

        If there are more, only those with the first value of the last label. Empty if these are
        still more than ``most``, or if the values of a label can't be listed.
        """
        lists = [sorted(words) if isinstance(words, set) else words for words in self._words]
        if not all(isinstance(words, Iterable) for words in lists):
            return []
        known = [list(dict.fromkeys(words)) for words in lists if isinstance(words, Iterable)]
        if len(known) > 1 and math.prod(map(len, known)) > most:
            known[-1] = known[-1][:1]
        if math.prod(map(len, known)) > most:
            return []
        return [tuple(map(str, words)) for words in itertools.product(*known)]


class Metric(Generic[Cell]):
    """Metric that this process counts."""

    def __init__(
        self, declaration: Declaration, labels: Labels, cell: Callable[[Declaration], Cell]
    ) -> None:
        self.declaration = declaration
        self._labels, self._cell = labels, cell
        self._cells: dict[tuple[str, ...], Cell] = {}
        if not labels.names:  # shown from the beginning
            self.labels()

    def labels(self, *words: str) -> Cell:
        """Return the cell of these values, in the order in which the labels were declared."""
        found = self._cells.get(words)
        if found is None:
            known = self._labels.known(words)
            found = self._cells.setdefault(known, self._cell(self.declaration))
        return found

    def reading(self) -> Reading:
        """Return all counts."""
        cells = list(self._cells.items())
        return Reading(self.declaration, [Series(words, cell.values) for words, cell in cells])

    def zeros(self) -> Reading:
        """Return zero for all label values: a series that begins at 0 shows its first increase."""
        metric = self.declaration
        found = self._labels.all(_MOST_ZEROS[metric.kind])
        return Reading(metric, [Series(words, [0.0] * metric.num_values) for words in found])

    def reset(self) -> None:
        for cell in self._cells.values():
            cell.reset()


class Observed(Generic[Source]):
    """Metric whose values another process reports on request.

    ``value`` computes the metric of a source: an answer of that process, or a part of one.
    """

    def __init__(
        self, declaration: Declaration, labels: Labels, value: Callable[[Source], float]
    ) -> None:
        self.declaration = declaration
        self._labels, self._value = labels, value

    def reading(self, source: Source) -> Reading:
        """Return the reading of a metric without a label."""
        return Reading(self.declaration, [Series((), [float(self._value(source))])])

    def reading_by(self, sources: Mapping[Word, Source]) -> Reading:
        """Return the reading of a metric with one label: a source for each value."""
        sums: dict[tuple[str, ...], float] = {}
        for word, source in sources.items():
            known = self._labels.known([word])
            sums[known] = sums.get(known, 0.0) + self._value(source)
        return Reading(self.declaration, [Series(words, [n]) for words, n in sums.items()])


class Registry:
    """Metrics of one process; ``source`` identifies the process to others.

    Invariants: a name is declared at most once.
    """

    def __init__(self) -> None:
        self._declared: dict[str, Declaration] = {}
        self._counted: list[Metric[CounterCell] | Metric[GaugeCell] | Metric[HistogramCell]] = []
        self._source: int | None = None

    # Declarations: a second declaration of a name raises ValueError

    def counter(self, name: str, help: str, /, **labels: Container[str]) -> Metric[CounterCell]:
        """Declare a metric that only grows; its name ends in ``_total``."""
        metric = Metric(*self._declare("counter", name, help, labels), CounterCell)
        self._counted.append(metric)
        return metric

    def gauge(self, name: str, help: str, /, **labels: Container[str]) -> Metric[GaugeCell]:
        """Declare a metric with a current value."""
        metric = Metric(*self._declare("gauge", name, help, labels), GaugeCell)
        self._counted.append(metric)
        return metric

    def histogram(
        self, name: str, help: str, buckets: Sequence[float], /, **labels: Container[str]
    ) -> Metric[HistogramCell]:
        """Declare a distribution of observed values; ``buckets`` are upper bounds."""
        declared = self._declare("histogram", name, help, labels, tuple(buckets))
        metric = Metric(*declared, HistogramCell)
        self._counted.append(metric)
        return metric

    def observed(
        self,
        kind: Literal["counter", "gauge"],
        name: str,
        help: str,
        value: Callable[[Source], float],
        /,
        **labels: Container[str],
    ) -> Observed[Source]:
        """Declare a metric that another process counts, and this one requests."""
        return Observed(*self._declare(kind, name, help, labels), value)

    def observed_fields(
        self,
        record: type[Source],
        metrics: Mapping[str, tuple[str, str]],
        /,
        **labels: Container[str],
    ) -> list[Observed[Source]]:
        """Declare metrics whose values are fields of a record that another process sends.

        Args:
            metrics: Field and help of each metric, by its name; ``_total`` ends that of a counter.
        """
        unknown = {field for field, _ in metrics.values()} - record.__annotations__.keys()
        if unknown:
            raise ValueError(f"{record.__name__} has no {', '.join(sorted(unknown))}")
        return [
            self.observed(
                "counter" if name.endswith("_total") else "gauge",
                name,
                help,
                attrgetter(field),
                **labels,
            )
            for name, (field, help) in metrics.items()
        ]

    def _declare(
        self,
        kind: Kind,
        name: str,
        help: str,
        words: Mapping[str, Container[str]],
        buckets: tuple[float, ...] = (),
    ) -> tuple[Declaration, Labels]:
        labels = Labels(words)
        declaration = Declaration(name, kind, help, labels.names, buckets)
        fault = "it has been declared already" if name in self._declared else declaration.fault()
        if fault is not None:
            raise ValueError(f"{name}: {fault}")
        self._declared[name] = declaration
        return declaration, labels

    # Questions

    @property
    def declarations(self) -> list[Declaration]:
        return list(self._declared.values())

    @property
    def source(self) -> int:
        if self._source is None:
            self._source = secrets.randbits(62)
        return self._source

    def readings(self) -> list[Reading]:
        """Return all counts of this process since it began."""
        return [metric.reading() for metric in self._counted]

    def zeros(self) -> list[Reading]:
        """Return all series that this process may come to count, with zero counts."""
        return [metric.zeros() for metric in self._counted]

    def begin_at_zero(self) -> None:
        """Count 0 under all label values, so that each is pushed; for processes with few series."""
        for metric in self._counted:
            for each in metric.zeros().series:
                metric.labels(*each.labels)

    def reset(self) -> None:
        """Begin as a new process without counts."""
        self._source = None
        for metric in self._counted:
            metric.reset()


REGISTRY = Registry()
"""Registry of this process. A forked child is another process, and begins without counts."""
os.register_at_fork(after_in_child=REGISTRY.reset)

counter = REGISTRY.counter
gauge = REGISTRY.gauge
histogram = REGISTRY.histogram
observed = REGISTRY.observed
observed_fields = REGISTRY.observed_fields
