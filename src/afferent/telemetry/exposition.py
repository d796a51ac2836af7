"""Readings in Prometheus' text format."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from afferent.telemetry.readings import MAX_METRICS, MAX_SERIES, Declaration, Reading, Series

CONTENT_TYPE = "text/plain; version=0.0.4"


def render(readings: Iterable[Reading]) -> bytes:
    """Return the metrics page. Of several readings of one metric the last one counts."""
    return b"".join(parts(readings))


def parts(readings: Iterable[Reading]) -> Iterator[bytes]:
    """Write the metrics page, one metric at a time."""
    last = {reading.metric.name: reading for reading in readings}
    return map(_part, last.values())


def with_zeros(readings: Iterable[Reading], zeros: Iterable[Reading]) -> list[Reading]:
    """Add the series of ``zeros`` that were not counted yet."""
    by_name = {reading.metric.name: reading for reading in readings}
    for zero in zeros:
        known = by_name.get(zero.metric.name, zero).series
        counted = {each.labels for each in known}
        missing = [each for each in zero.series if each.labels not in counted]
        series = [*known, *missing] if known is not zero.series else known
        by_name[zero.metric.name] = Reading(zero.metric, series)
    return list(by_name.values())


def _part(reading: Reading) -> bytes:
    metric = reading.metric
    lines = (_lines(metric, each.labels, tuple(each.values)) for each in reading.series)
    return b"".join((_head(metric), *lines))


@functools.lru_cache(MAX_METRICS)
def _head(metric: Declaration) -> bytes:
    return text_of([_family(Reading(metric, []))])


@functools.lru_cache(MAX_SERIES)
def _lines(metric: Declaration, labels: tuple[str, ...], values: tuple[float, ...]) -> bytes:
    """Return the lines of one series; cached, because most don't change between two pages."""
    text = text_of([_family(Reading(metric, [Series(labels, [*values])]))])
    return text.removeprefix(_head(metric))


def text_of(families: Sequence[Metric]) -> bytes:
    """Return the text of metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        return self._families


def _family(reading: Reading) -> Metric:
    metric = reading.metric
    match metric.kind:
        case "counter" | "gauge":
            made = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = made(metric.name, metric.help, labels=metric.labels)
            for each in reading.series:
                family.add_metric(each.labels, each.values[0])
            return family
        case "histogram":
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            bounds = [*map(str, metric.buckets), "+Inf"]
            for each in reading.series:
                *counts, total = each.values
                buckets = list(zip(bounds, itertools.accumulate(counts), strict=True))
                histogram.add_metric(each.labels, buckets, total)
            return histogram
