"""Readings in Prometheus' text form."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from afferent.telemetry.readings import Reading

CONTENT_TYPE = "text/plain; version=0.0.4"


def render(readings: Iterable[Reading]) -> bytes:
    """The page. Of several readings of one metric the last one counts."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Readings(readings))
    return generate_latest(registry)


class _Readings(Collector):
    def __init__(self, readings: Iterable[Reading]) -> None:
        self._readings = {reading.metric.name: reading for reading in readings}

    def collect(self) -> Iterator[Metric]:
        return map(_family, self._readings.values())


def _family(reading: Reading) -> Metric:
    metric = reading.metric
    match metric.kind:
        case "counter":
            counter = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
            for each in reading.series:
                counter.add_metric(each.labels, each.values[0])
            return counter
        case "gauge":
            gauge = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            for each in reading.series:
                gauge.add_metric(each.labels, each.values[0])
            return gauge
        case "histogram":
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            bounds = [*map(str, metric.buckets), "+Inf"]
            for each in reading.series:
                *counts, total = each.values
                buckets = list(zip(bounds, itertools.accumulate(counts), strict=True))
                histogram.add_metric(each.labels, buckets, total)
            return histogram
