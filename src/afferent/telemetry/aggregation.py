"""Sums of the metrics of all processes. Pure.

- A process pushes all its counts since it began, again and again; the latest push counts.
- The counts of an ended process stay, or sums would fall; its gauges, such as requests in flight,
  are removed.
- No metric is known in advance: its declaration, which comes with each push, defines its sum.
- Memory is bounded by the limits of one process, and by separate limits for ended processes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from afferent.errors import FormatError, NotPermitted
from afferent.telemetry.readings import (
    MAX_METRICS,
    MAX_SERIES,
    MAX_VALUES,
    OTHER,
    Declaration,
    Reading,
    Series,
)
from afferent.types import ClientId

_MAX_GONE = 64
"""Ended processes that may reconnect and continue."""
_MAX_DECLARED = 2 * MAX_METRICS
"""Largest number of different metrics of all processes, ended ones included."""
_MAX_GONE_SERIES = 2 * MAX_SERIES
"""Limit for processes that have ended for good; further series count as ``other``."""


class Aggregation:
    """Latest readings of each process, and one sum of the ended ones.

    Invariants:
        - A source is live or gone, not both.
        - A name has one declaration for all processes.
    """

    def __init__(self) -> None:
        self._declared: dict[str, Declaration] = {}
        self._live: dict[int, tuple[ClientId, list[Reading]]] = {}  # by source
        self._gone: OrderedDict[int, list[Reading]] = OrderedDict()
        self._base = _Sums(max_series=_MAX_GONE_SERIES)
        self._of_gone: list[Reading] | None = None  # sum of both, cached

    def push(self, client: ClientId, source: int, readings: Sequence[Reading]) -> None:
        """Replace the readings of a process; all of them or none.

        Raises:
            FormatError: A declaration is invalid or differs from an earlier one, values don't match
                their metric, or one process sends too many of them.
            NotPermitted: The client has pushed for another process, or there would be too many
                metrics.
        """
        if any(owner == client and known != source for known, (owner, _) in self._live.items()):
            raise NotPermitted("a client tells what one process has counted")
        _check_size(readings)
        new = {}
        for reading in readings:
            metric = reading.metric
            known = self._declared.get(metric.name)
            if known is None:
                new[metric.name] = metric
            fault = metric.fault() if known is None else None
            if fault is not None or known not in (None, metric) or not reading.is_sound:
                raise FormatError(fault or "a metric is not as it was declared")
        if len(self._declared) + len(new) > _MAX_DECLARED:
            raise NotPermitted("there are too many metrics")
        self._declared |= new
        if self._gone.pop(source, None) is not None:  # it has reconnected and pushes all its counts
            self._of_gone = None
        self._live[source] = (client, list(readings))

    def lose(self, client: ClientId) -> None:
        """Move the readings of a disconnected client to the ended ones."""
        for source in [s for s, (owner, _) in self._live.items() if owner == client]:
            _, readings = self._live.pop(source)
            self._gone[source] = [each for each in readings if each.metric.is_cumulative]
            self._of_gone = None
        while len(self._gone) > _MAX_GONE:
            _, readings = self._gone.popitem(last=False)
            self._base.add(readings)

    def total(self) -> list[Reading]:
        """Return the sums of all series, with every metric that was ever declared."""
        sums = _Sums()
        sums.add([Reading(metric, []) for _, metric in sorted(self._declared.items())])
        sums.add(self._sum_of_gone())
        for _, readings in self._live.values():
            sums.add(readings)
        return sums.readings()

    def _sum_of_gone(self) -> list[Reading]:
        if self._of_gone is None:
            sums = _Sums()
            for readings in [self._base.readings(), *self._gone.values()]:
                sums.add(readings)
            self._of_gone = sums.readings()
        return self._of_gone


class _Sums:
    def __init__(self, *, max_series: int | None = None) -> None:
        self._max_series, self._num_series = max_series, 0
        self._by_metric: dict[Declaration, dict[tuple[str, ...], list[float]]] = {}

    def add(self, readings: Iterable[Reading]) -> None:
        for reading in readings:
            sums = self._by_metric.setdefault(reading.metric, {})
            for each in reading.series:
                labels = each.labels
                if labels not in sums and self._is_full:
                    labels = (OTHER,) * len(labels)
                known = sums.get(labels)
                if known is None:
                    sums[labels] = list(each.values)
                    self._num_series += labels == each.labels
                else:
                    for index, value in enumerate(each.values):
                        known[index] += value

    @property
    def _is_full(self) -> bool:
        return self._max_series is not None and self._num_series >= self._max_series

    def readings(self) -> list[Reading]:
        return [
            Reading(metric, [Series(labels, sums[labels]) for labels in sorted(sums)])
            for metric, sums in self._by_metric.items()
        ]


def _check_size(readings: Sequence[Reading]) -> None:
    series = [each for reading in readings for each in reading.series]
    if (
        len({reading.metric.name for reading in readings}) < len(readings)
        or len(readings) > MAX_METRICS
        or len(series) > MAX_SERIES
        or sum(len(each.values) for each in series) > MAX_VALUES
    ):
        raise FormatError("a process tells of so many metrics and series, and of each once")
