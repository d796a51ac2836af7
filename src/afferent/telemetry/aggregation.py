"""What all processes have counted, added up. Pure.

A process pushes all that it has counted since it began, again and again; the latest of it counts.
What a process that is gone had counted stays, or sums would fall; what it had *now*, such as
requests in flight, goes with it.

No metric is known beforehand: how it adds up is in its declaration, which comes with each push.
Memory is bounded by what one process may tell, and for those that are gone by limits of its own.
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
"""Processes that are gone and might come back, under another connection, to continue."""
_MAX_DECLARED = 2 * MAX_METRICS
"""Metrics of all processes that there have been."""
_MAX_GONE_SERIES = 2 * MAX_SERIES
"""Of all processes that are gone for good; what is beyond counts as ``other``."""


class Aggregation:
    """Keeps the latest readings of each process, and one sum of those that are gone."""

    def __init__(self) -> None:
        self._declared: dict[str, Declaration] = {}
        self._live: dict[int, tuple[ClientId, list[Reading]]] = {}  # by source
        self._gone: OrderedDict[int, list[Reading]] = OrderedDict()
        self._base = _Sums(max_series=_MAX_GONE_SERIES)
        self._of_gone: list[Reading] | None = None  # of both; until one goes or comes back

    def push(self, client: ClientId, source: int, readings: Sequence[Reading]) -> None:
        """What a process has counted, in place of what it said before; all of it or nothing.

        Raises:
            FormatError: A metric that is badly declared, or otherwise than before; numbers that
                can't be its; or more of them than one process may tell of.
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
        if self._gone.pop(source, None) is not None:  # back, with all that it has counted
            self._of_gone = None
        self._live[source] = (client, list(readings))

    def lose(self, client: ClientId) -> None:
        """A client is gone."""
        for source in [s for s, (owner, _) in self._live.items() if owner == client]:
            _, readings = self._live.pop(source)
            self._gone[source] = [each for each in readings if each.metric.is_cumulative]
            self._of_gone = None
        while len(self._gone) > _MAX_GONE:
            _, readings = self._gone.popitem(last=False)
            self._base.add(readings)

    def total(self) -> list[Reading]:
        """The sums of all series, and every metric that was ever declared."""
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
