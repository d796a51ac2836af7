"""The suite for families passes the native families, and catches broken ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from afferent.conformance import CHECKS_OF_FAMILIES, NotConforming, check_family
from afferent.errors import InvalidMedia
from afferent.media.decoded import Array, Media
from afferent.media.families.family import MediaTokens
from afferent.media.families.images import ImageFamily, decoded_image
from afferent.media.families.plan import FeaturePlan
from afferent.media.families.registry import describe
from afferent.media.headers.probe import ImageHeader, MediaHeader
from afferent.types import TensorSpec
from tests.media.test_families import FOLDERS

SIZES = [(64, 48), (33, 200), (250, 90)]


@pytest.mark.parametrize("name", CHECKS_OF_FAMILIES)
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl", "clip", "siglip", "gemma3"])
def test_native_families_pass(name: str, kind: str, tmp_path: Path) -> None:
    FOLDERS[kind](tmp_path)
    family = describe(tmp_path)
    assert family is not None
    check_family(name, family, sizes=SIZES)


class Means(ImageFamily, tag="means", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Means of an image's columns: as many rows as it has columns."""

    most_rows: int = 10_000

    def plan(self, header: MediaHeader) -> FeaturePlan:
        assert isinstance(header, ImageHeader)
        specs = {"means": TensorSpec("float32", (header.width,))}
        return FeaturePlan(specs, (min(header.width, self.most_rows),))

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        out["means"][:] = decoded_image(media).pixels.mean(axis=(0, 2))

    def model_inputs(self, features: Mapping[str, Any]) -> dict[str, Any]:
        return dict(features)


class Forgets(Means, tag="forgets", frozen=True, kw_only=True, forbid_unknown_fields=True):
    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        out["means"][1:] = decoded_image(media).pixels.mean(axis=(0, 2))[1:]


class Guesses(Means, tag="guesses", frozen=True, kw_only=True, forbid_unknown_fields=True):
    def plan(self, header: MediaHeader) -> FeaturePlan:
        rows = int(np.random.default_rng().integers(1, 1 << 30))
        return FeaturePlan(super().plan(header).specs, (rows,))


class Fails(Means, tag="fails", frozen=True, kw_only=True, forbid_unknown_fields=True):
    def plan(self, header: MediaHeader) -> FeaturePlan:
        assert isinstance(header, ImageHeader)
        return FeaturePlan({}, (1000 // (header.width - 1),))


class Grows(Means, tag="grows", frozen=True, kw_only=True, forbid_unknown_fields=True):
    factor: int = 1

    def plan(self, header: MediaHeader) -> FeaturePlan:
        assert isinstance(header, ImageHeader)
        return FeaturePlan(super().plan(header).specs, (self.factor * header.width,))

    def bounded(self, max_pixels: int) -> Grows:
        return Grows(image=self.image, factor=2)


TOKENS = MediaTokens(1, 2)


@pytest.mark.parametrize("name", CHECKS_OF_FAMILIES)
def test_a_family_of_ten_lines_passes(name: str) -> None:
    check_family(name, Means(image=TOKENS), sizes=SIZES)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("writes_all_features", Forgets(image=TOKENS)),
        ("plans_alike", Guesses(image=TOKENS)),
        ("refuses_or_plans", Fails(image=TOKENS)),
        ("respects_a_bound", Grows(image=TOKENS)),
    ],
)
def test_a_broken_family_does_not(name: str, family: Means) -> None:
    with pytest.raises(NotConforming):
        check_family(name, family, sizes=SIZES)


def test_a_family_may_refuse() -> None:
    class Refuses(Means, tag="refuses", frozen=True, kw_only=True, forbid_unknown_fields=True):
        def plan(self, header: MediaHeader) -> FeaturePlan:
            raise InvalidMedia("too long")

    check_family("refuses_or_plans", Refuses(image=TOKENS), sizes=[])
