"""The page is what Prometheus' own library writes, byte for byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from afferent.telemetry import exposition
from afferent.telemetry.readings import Declaration, Kind, Reading, Series

LABELS = ("a", "api", "leaf", "outcome")
WORDS = st.text(st.characters(codec="utf-8"), max_size=12)
NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(0, 2**53).map(float),
    st.sampled_from([0.0, -0.0, 999_999.0, 1e6, 1e21, 0.1, 1e-7]),
)
BUCKETS = (0.001, 0.5, 1.0, 30.0, 2_000_000.0)


class Reference(Collector):
    def __init__(self, readings: list[Reading]) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        return map(family_of, self._readings)


def family_of(reading: Reading) -> Metric:
    metric = reading.metric
    if metric.kind == "histogram":
        histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        bounds = [*map(str, metric.buckets), "+Inf"]
        for each in reading.series:
            *counts, total = each.values
            buckets = list(zip(bounds, itertools.accumulate(counts), strict=True))
            histogram.add_metric(each.labels, buckets, total)
        return histogram
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for each in reading.series:
        family.add_metric(each.labels, each.values[0])
    return family


@st.composite
def readings(draw: st.DrawFn) -> Reading:
    kind: Kind = draw(st.sampled_from(["counter", "gauge", "histogram"]))
    name = f"afferent_{draw(st.integers(0, 3))}_{kind}" + ("_total" if kind == "counter" else "")
    labels = tuple(draw(st.lists(st.sampled_from(LABELS), unique=True)))
    buckets = BUCKETS if kind == "histogram" else ()
    declared = Declaration(name, kind, draw(WORDS), labels, buckets)
    counts = st.integers(0, 10**9).map(float)
    series = []
    for _ in range(draw(st.integers(0, 3))):
        words = tuple(draw(WORDS) for _ in labels)
        values = [draw(NUMBERS)]
        if kind == "histogram":
            values = [*(draw(counts) for _ in range(len(BUCKETS) + 1)), *values]
        series.append(Series(words, values))
    return Reading(declared, series)


@given(st.lists(readings(), max_size=5, unique_by=lambda reading: reading.metric.name))
def test_the_page_is_as_the_library_writes_it(given: list[Reading]) -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Reference(given))
    assert exposition.render(given) == generate_latest(registry)


def test_of_two_readings_of_a_metric_the_last_one_counts() -> None:
    declared = Declaration("afferent_g", "gauge", "How many")
    old, new = (Reading(declared, [Series((), [value])]) for value in (1.0, 2.0))
    page = b"# HELP afferent_g How many\n# TYPE afferent_g gauge\nafferent_g 2.0\n"
    assert exposition.render([old, new]) == page
