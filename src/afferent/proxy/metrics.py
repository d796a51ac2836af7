"""Merging of the metrics pages of several servers."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from afferent.telemetry.exposition import text_of

LABEL = "upstream"


def joined(pages: Sequence[tuple[str, bytes]]) -> bytes:
    """Return a single page unchanged; of several, label each sample with its server."""
    if len(pages) < 2:
        return b"".join(page for _, page in pages)
    families: dict[str, Metric] = {}
    for name, page in pages:
        for family in text_string_to_metric_families(page.decode(errors="replace")):
            known = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            known.samples += [
                Sample(each.name, {**each.labels, LABEL: name}, each.value)
                for each in family.samples
            ]
    return text_of(list(families.values()))
