"""Wire types of metrics: declarations, and their values.

A declaration travels with its values, so the receiver that adds them up, or writes them for
Prometheus, needs no list of metrics.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta, Struct

MAX_METRICS = 256
"""Largest number of metrics of one process."""
MAX_SERIES = 4096
MAX_VALUES = 1 << 15

OTHER = "other"
"""Value of a label in place of an unknown one."""

Kind = Literal["counter", "gauge", "histogram"]

_NAME = re.compile(r"[a-z][a-z0-9_]{0,79}")
_PART_ENDS = ("_bucket", "_count", "_sum", "_created", "_info")
_MAX_BUCKETS = 62


class Declaration(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Declaration of a metric; ``buckets`` are the upper bounds of a histogram's."""

    name: Annotated[str, Meta(max_length=80)]
    kind: Kind
    help: Annotated[str, Meta(max_length=400)]
    labels: Annotated[tuple[Annotated[str, Meta(max_length=80)], ...], Meta(max_length=8)] = ()
    buckets: Annotated[tuple[float, ...], Meta(max_length=_MAX_BUCKETS)] = ()

    @property
    def is_cumulative(self) -> bool:
        """Whether it only grows; a gauge is a current value."""
        return self.kind != "gauge"

    @property
    def num_values(self) -> int:
        return len(self.buckets) + 2 if self.kind == "histogram" else 1

    def fault(self) -> str | None:
        """Return the error that would make Prometheus refuse the declaration, or ``None``."""
        if _NAME.fullmatch(self.name) is None or self.name.endswith(_PART_ENDS):
            return "this can't be a metric's name"
        if self.name.endswith("_total") != (self.kind == "counter"):
            return "a counter's name, and no other's, ends in _total"
        is_named = all(_NAME.fullmatch(label) and label != "le" for label in self.labels)
        if not is_named or len(set(self.labels)) < len(self.labels):
            return "labels have a name each"
        if bool(self.buckets) != (self.kind == "histogram") or len(self.buckets) > _MAX_BUCKETS:
            return "a histogram, and no other, has buckets"
        bounds = [-math.inf, *self.buckets, math.inf]
        if not all(low < high for low, high in pairwise(bounds)):
            return "the bounds of buckets are numbers that grow"
        return None


class Series(Struct, array_like=True, forbid_unknown_fields=True):
    """Values of a metric for one combination of label values.

    A histogram has the count of each bucket, the count above all buckets, and the sum of observed
    values. Any other metric has one value.
    """

    labels: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=8)]
    values: Annotated[list[float], Meta(max_length=_MAX_BUCKETS + 2)]


class Reading(Struct, array_like=True, forbid_unknown_fields=True):
    """Metric with all its series."""

    metric: Declaration
    series: Annotated[list[Series], Meta(max_length=MAX_SERIES)]

    @property
    def is_sound(self) -> bool:
        """Whether each series has as many labels and values as the metric declares."""
        num_labels, num_values = len(self.metric.labels), self.metric.num_values
        return all(
            len(each.labels) == num_labels
            and len(each.values) == num_values
            and math.isfinite(sum(each.values))
            for each in self.series
        )
