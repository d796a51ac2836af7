"""What processes tell one another of their metrics: how each is declared, and its numbers.

A declaration travels with the numbers, so who adds them up, or writes them for Prometheus, needs to
know of no metric beforehand.
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta, Struct

MAX_METRICS = 256
"""That one process may tell of."""
MAX_SERIES = 4096
MAX_VALUES = 1 << 15

OTHER = "other"
"""What a label says in place of a word that it may not have."""

Kind = Literal["counter", "gauge", "histogram"]

_NAME = re.compile(r"[a-z][a-z0-9_]{0,79}")
_PART_ENDS = ("_bucket", "_count", "_sum", "_created", "_info")
_MAX_BUCKETS = 62


class Declaration(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``buckets`` are the upper bounds of a histogram's."""

    name: Annotated[str, Meta(max_length=80)]
    kind: Kind
    help: Annotated[str, Meta(max_length=400)]
    labels: Annotated[tuple[Annotated[str, Meta(max_length=80)], ...], Meta(max_length=8)] = ()
    buckets: Annotated[tuple[float, ...], Meta(max_length=_MAX_BUCKETS)] = ()

    @property
    def is_cumulative(self) -> bool:
        """Whether it only grows; a gauge says how things are now."""
        return self.kind != "gauge"

    @property
    def num_values(self) -> int:
        return len(self.buckets) + 2 if self.kind == "histogram" else 1

    def fault(self) -> str | None:
        """What is wrong with it, so that Prometheus would not have it beside others."""
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
    """The numbers under one word for each label: of a histogram, how many fell into each bucket,
    how many above all of them, and the sum of what was observed; of any other metric, one.
    """

    labels: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=8)]
    values: Annotated[list[float], Meta(max_length=_MAX_BUCKETS + 2)]


class Reading(Struct, array_like=True, forbid_unknown_fields=True):
    """A metric, and all its series."""

    metric: Declaration
    series: Annotated[list[Series], Meta(max_length=MAX_SERIES)]

    @property
    def is_sound(self) -> bool:
        """Whether the series can be this metric's: as many words and numbers as it takes."""
        num_labels, num_values = len(self.metric.labels), self.metric.num_values
        return all(
            len(each.labels) == num_labels
            and len(each.values) == num_values
            and math.isfinite(sum(each.values))
            for each in self.series
        )
