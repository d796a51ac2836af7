"""Counters and histograms of one process, in Prometheus' text form.

Labels are words from fixed lists: never a URL, a hash or anything else that a client chooses.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """What a frontend counts."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "afferent_requests",
            "Requests by API and outcome: ok, or the code of an error",
            ["api", "outcome"],
            registry=self._registry,
        )
        self.request_seconds = Histogram(
            "afferent_request_seconds",
            "Seconds from a request's arrival to the end of its answer",
            ["api"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.stage_seconds = Histogram(
            "afferent_stage_seconds",
            "Seconds of each stage of a request",
            ["stage"],
            buckets=(0.0001, 0.0005, 0.001, 0.005, *_SECONDS[1:]),
            registry=self._registry,
        )
        self.items = Counter(
            "afferent_items",
            "Media items by modality and outcome: hit, made, joined or failed",
            ["modality", "outcome"],
            registry=self._registry,
        )
        self.copied_nbytes = Counter(
            "afferent_copied_bytes",
            "Bytes that stages copied",
            ["stage"],
            registry=self._registry,
        )
        self.tokens = Counter(
            "afferent_tokens", "Tokens, prompt and completion", ["kind"], registry=self._registry
        )
        self.in_flight = Gauge(
            "afferent_requests_in_flight", "Requests being answered", registry=self._registry
        )
        self.admission_seconds = Histogram(
            "afferent_admission_seconds",
            "Seconds that a request waited for room in the arena, whether it came to it or not",
            buckets=(0.001, *_SECONDS[1:]),
            registry=self._registry,
        )
        self.admission_waiting = Gauge(
            "afferent_admission_waiting",
            "Requests that wait for room in the arena",
            registry=self._registry,
        )
        self._store = Gauge(
            "afferent_store", "The store's own figures", ["figure"], registry=self._registry
        )

    def set_store_figures(self, figures: Mapping[str, object]) -> None:
        """The store's statistics, fetched for this scrape; those of a kind begin with its name."""
        for name, value in figures.items():
            if isinstance(value, int):
                self._store.labels(name).set(value)
            elif isinstance(value, Mapping):
                for kind, parts in value.items():
                    self.set_store_figures({f"{kind}_{part}": v for part, v in parts.items()})

    def render(self) -> bytes:
        return generate_latest(self._registry)
