"""Metrics pages: one of this server's counts, and one of several servers' pages.

They are written with rests: a client that asks for metrics must not delay the requests of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from afferent.media.body.pace import Pace
from afferent.telemetry import exposition
from afferent.telemetry.readings import Reading
from afferent.telemetry.registry import REGISTRY

LABEL = "upstream"
_SLICE_S = 0.002
"""Time between two rests; one metric with many labels takes as long again."""


async def written(readings: Iterable[Reading]) -> bytes:
    """Return the page of these counts, with a zero for each series that was not counted yet."""
    pace = Pace(_SLICE_S)
    counted = exposition.with_zeros(readings, REGISTRY.zeros())
    return await _paced(exposition.parts(counted), pace)


async def joined(pages: Sequence[tuple[str, bytes]]) -> bytes:
    """Return a single page unchanged; of several, label each sample with its server."""
    if len(pages) < 2:
        return b"".join(page for _, page in pages)
    families: dict[str, Metric] = {}
    pace = Pace(_SLICE_S)
    for name, page in pages:
        for family in text_string_to_metric_families(page.decode(errors="replace")):
            known = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            known.samples += [
                Sample(each.name, {**each.labels, LABEL: name}, each.value)
                for each in family.samples
            ]
            await pace.rest()
    return await _paced((exposition.text_of([family]) for family in families.values()), pace)


async def _paced(parts: Iterable[bytes], pace: Pace) -> bytes:
    page = bytearray()
    for part in parts:
        page += part
        await pace.rest()
    return bytes(page)
