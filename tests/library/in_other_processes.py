"""Functions that run in other processes: they import no torch, which would take seconds."""

from __future__ import annotations

from afferent import Features, ItemFeatures, SharedItem


def make(arguments: tuple[Features, bytes]) -> ItemFeatures:
    features, data = arguments
    return features.make(data)


def total(item: SharedItem) -> int:
    return int(item.features()["pixel_values"].sum())
