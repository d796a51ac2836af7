"""Savings of hits: the work that found items did not repeat. Pure.

The counts of items are measured. Time and bytes are estimates: hits, times the measured mean of the
items of that modality whose features were made here. So they contain no encoder, no download and no
item that was found in a tier, and a modality without a made item counts nothing.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from afferent.operations.live_page.figures import Change
from afferent.types import Modality

_ITEMS: Final = "afferent_items_total"
_SECONDS: Final = "afferent_stage_seconds"
_COPIED: Final = "afferent_copied_bytes_total"
_OUTCOMES: Final = ("hit", "joined", "fetched", "made", "failed")
_STAGES: Final = ("read_container", "decode", "process")
"""Stages of a job that makes features; each job has one ``process``, which writes them."""


class Savings(Struct, frozen=True, kw_only=True):
    """Savings since the counts began, with the counts that they are computed from.

    Attributes:
        num_items: By outcome, such as ``hit`` and ``made``.
        num_unmeasured: Hits without an estimate: no item of their modality was made here alone.
        saved_s: Seconds that workers did not spend again.
        saved_s_per_s: Likewise for the hits of the view's interval, each second.
        copied_nbytes: Bytes of pixels, samples and features that were not copied again.
        features_nbytes: The part of them that is features: memory that no request filled again.
    """

    num_items: dict[str, int]
    hit_rate: float | None
    num_unmeasured: int
    saved_s: float
    saved_s_per_s: float
    copied_nbytes: float
    features_nbytes: float


def savings(change: Change) -> Savings:
    """Return the savings by the later of two snapshots."""
    num_items = {each: round(change.now(_ITEMS, outcome=each)) for each in _OUTCOMES}
    num_unmeasured = 0
    saved_s = saved_s_per_s = copied_nbytes = features_nbytes = 0.0
    for modality in Modality:
        hits = change.now(_ITEMS, modality=modality, outcome="hit")
        num_made, _ = change.observed(_SECONDS, stage="process", media=modality)
        if not num_made:
            num_unmeasured += round(hits)
            continue
        spent_s = sum(change.observed(_SECONDS, stage=each, media=modality)[1] for each in _STAGES)
        copied = {each: change.now(_COPIED, stage=each, media=modality) for each in _STAGES}
        hits_per_s = change.rate(_ITEMS, modality=modality, outcome="hit")
        saved_s += hits * spent_s / num_made
        saved_s_per_s += hits_per_s * spent_s / num_made
        copied_nbytes += hits * sum(copied.values()) / num_made
        features_nbytes += hits * copied["process"] / num_made
    total = sum(num_items.values())
    return Savings(
        num_items=num_items,
        hit_rate=num_items["hit"] / total if total else None,
        num_unmeasured=num_unmeasured,
        saved_s=saved_s,
        saved_s_per_s=saved_s_per_s,
        copied_nbytes=copied_nbytes,
        features_nbytes=features_nbytes,
    )
