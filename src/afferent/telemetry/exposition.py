"""Readings in Prometheus' text form.

Written here because it is asked for again and again by whoever watches, in the loop that serves
requests: the library for it takes five times as long. Tests compare this with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.utils import floatToGoString

from afferent.telemetry.readings import Reading

CONTENT_TYPE = "text/plain; version=0.0.4"
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


def render(readings: Iterable[Reading]) -> bytes:
    """The page. Of several readings of one metric the last one counts."""
    last = {reading.metric.name: reading for reading in readings}
    return "".join(itertools.chain.from_iterable(map(_lines, last.values()))).encode()


def _lines(reading: Reading) -> Iterator[str]:
    metric = reading.metric
    yield f"# HELP {metric.name} {metric.help.translate(_HELP_ESCAPES)}\n"
    yield f"# TYPE {metric.name} {metric.kind}\n"
    for each in reading.series:
        pairs = sorted(zip(metric.labels, each.labels, strict=True))
        labels = [f'{name}="{word.translate(_ESCAPES)}"' for name, word in pairs]
        if metric.kind == "histogram":
            before_le = sum(name < "le" for name, _ in pairs)
            yield from _histogram(metric.name, metric.buckets, each.values, labels, before_le)
        else:
            yield f"{metric.name}{_braced(labels)} {_number(each.values[0])}\n"


def _histogram(
    name: str, bounds: Sequence[float], values: Sequence[float], labels: list[str], before_le: int
) -> Iterator[str]:
    """``before_le``: labels stand in the order of their names, and so does ``le`` among them."""
    *counts, total = values
    first, last = labels[:before_le], labels[before_le:]
    num_observed = 0.0
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        num_observed += count
        braced = _braced([*first, f'le="{bound}"', *last])
        yield f"{name}_bucket{braced} {_number(num_observed)}\n"
    braced = _braced(labels)
    yield f"{name}_count{braced} {_number(num_observed)}\n{name}_sum{braced} {_number(total)}\n"


def _braced(labels: Sequence[str]) -> str:
    return f"{{{','.join(labels)}}}" if labels else ""


def _number(value: float) -> str:
    # Most are small whole numbers.
    if 0 < value < 1e6 and value == int(value):
        return f"{int(value)}.0"
    written: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return written
