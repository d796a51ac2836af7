"""The figures of all processes in Prometheus' text form."""

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

from afferent import metrics, series
from afferent.engine.protocol import Engine, EngineFigures
from afferent.metrics import Metrics
from afferent.series import Sample
from afferent.store import messages as m
from afferent.store.async_client import AsyncDaemonStore


async def scrape(store: AsyncDaemonStore, engine: Engine, counted: Metrics) -> bytes:
    """The sums over all processes, with this one's counts as they are now.

    Others' may be as old as `afferent.store.pushing.PERIOD_S`.

    Raises:
        Unavailable: The store, which has the sums, does not answer.
    """
    await store.push(counted.source, counted.samples())
    samples = [*await store.figures(), *store_samples(await store.stat())]
    if (figures := await engine.figures()) is not None:
        samples += engine_samples(figures)
    return render(samples)


def render(samples: Iterable[Sample]) -> bytes:
    """Every metric that there is, with the series that have been counted."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Sums(samples))
    return generate_latest(registry)


def store_samples(statistics: m.Statistics) -> Iterator[Sample]:
    """What the store knows."""
    for label in metrics.STORE.labels:
        for figure in sorted(label.words):
            yield Sample(metrics.STORE.name, [figure], [getattr(statistics, figure)])
    for kind, its in statistics.kinds.items():
        nbytes = {
            "capacity": its.capacity_nbytes,
            "used": its.used_nbytes,
            "held": its.held_nbytes,
            "granted": its.granted_nbytes,
            "largest_free": its.largest_free_nbytes,
        }
        for part, value in nbytes.items():
            yield Sample(metrics.ARENA_BYTES.name, [kind, part], [value])
        for part, value in {"all": its.num_objects, "held": its.num_held}.items():
            yield Sample(metrics.ARENA_OBJECTS.name, [kind, part], [value])
        yield Sample(metrics.EVICTIONS.name, [kind], [its.num_evicted])
    yield Sample(metrics.ADMISSION_WAITING.name, [], [statistics.num_reservations_queued])
    for family in metrics.SLOT_FAMILIES:
        slots = statistics.slots.get(family, m.SlotStatistics(0, 0))
        yield Sample(metrics.SLOTS.name, [family, "taken"], [slots.num_taken])
        yield Sample(metrics.SLOTS.name, [family, "queued"], [slots.num_queued])


def engine_samples(figures: EngineFigures) -> Iterator[Sample]:
    """What the engine knows."""
    for label in metrics.ENGINE.labels:
        for figure in sorted(label.words):
            yield Sample(metrics.ENGINE.name, [figure], [getattr(figures, figure)])
    for rank, num_encoded in enumerate(figures.num_encoded):
        yield Sample(metrics.ENGINE_ENCODED.name, [str(rank)], [num_encoded])


class _Sums(Collector):
    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples: dict[str, list[Sample]] = {}
        for sample in samples:
            self._samples.setdefault(sample.name, []).append(sample)

    def collect(self) -> Iterator[Metric]:
        for metric in metrics.REGISTRY.values():
            yield _family(metric, self._samples.get(metric.name, []))


def _family(metric: series.Metric, samples: Iterable[Sample]) -> Metric:
    names = [label.name for label in metric.labels]
    match metric.kind:
        case "counter":
            counter = CounterMetricFamily(metric.name, metric.help, labels=names)
            for sample in samples:
                counter.add_metric(sample.labels, sample.values[0])
            return counter
        case "gauge":
            gauge = GaugeMetricFamily(metric.name, metric.help, labels=names)
            for sample in samples:
                gauge.add_metric(sample.labels, sample.values[0])
            return gauge
        case "histogram":
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=names)
            bounds = [*map(str, metric.buckets), "+Inf"]
            for sample in samples:
                *counts, total = sample.values
                buckets = list(zip(bounds, itertools.accumulate(counts), strict=True))
                histogram.add_metric(sample.labels, buckets, total)
            return histogram
