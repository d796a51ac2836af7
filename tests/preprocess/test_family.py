"""What a family says of a picture from its size alone is what `transformers` makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from afferent.errors import ConfigError, InvalidMedia, UnsupportedModel
from afferent.preprocess.family import FixedFamily, Qwen2VlFamily, describe, fingerprint
from afferent.preprocess.measure import family_of
from afferent.preprocess.processor import HuggingFaceProcessor
from afferent.store import codec
from afferent.supervise import BUILT_IN_MODELS
from tests.models import make_llava

SHAPES = BUILT_IN_MODELS / "shapes"
DEFAULTS = Qwen2VlFamily(
    image_token_id=1,
    patch_size=14,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=56 * 56,
    max_pixels=28 * 28 * 1280,
)


@given(st.integers(2, 16_384), st.integers(2, 16_384))
@settings(max_examples=500, deadline=None)
def test_resized_size(width: int, height: int) -> None:
    family = DEFAULTS
    try:
        expected = smart_resize(height, width, 28, family.min_pixels, family.max_pixels)
    except ValueError:
        with pytest.raises(InvalidMedia):
            family.resized(width, height)
        return
    assert family.resized(width, height) == expected[::-1]


@pytest.mark.parametrize("size", [(2, 2), (27, 300), (640, 480), (123, 457), (1000, 100), (84, 84)])
@pytest.mark.parametrize("folder", [SHAPES, None])
def test_plans_are_exact(size: tuple[int, int], folder: Path | None, tmp_path: Path) -> None:
    if folder is None:
        folder = tmp_path
        Qwen2VLImageProcessorPil().save_pretrained(folder)
        (folder / "config.json").write_text('{"model_type": "qwen2_vl", "image_token_id": 5}')
    family = describe(folder)
    assert family is not None
    planned = family.plan(*size)
    features = HuggingFaceProcessor(folder, family).process(Image.new("RGB", size, "red"))
    assert {k: (v.dtype.name, v.shape) for k, v in features.items()} == {
        k: (spec.dtype, spec.shape) for k, spec in planned.specs.items()
    }
    assert planned.nbytes == codec.plan(features).nbytes
    rows, columns = features["image_grid_thw"][0][1:]
    assert planned.num_embeds == rows * columns // 4


def test_the_built_in_model_caps_a_picture_at_36_tokens() -> None:
    family = describe(SHAPES)
    assert family is not None
    rng = np.random.default_rng(0)
    for width, height in rng.integers(20, 5000, (300, 2)).tolist():
        if max(width, height) <= 36 * min(width, height):
            assert family.plan(width, height).num_embeds <= 36


def test_a_family_that_is_measured(tmp_path: Path) -> None:
    make_llava(tmp_path)
    assert describe(tmp_path) is None
    family = family_of(tmp_path)
    assert isinstance(family, FixedFamily)
    assert family.num_embeds == 16
    processor = HuggingFaceProcessor(tmp_path, family)
    for size in ((56, 56), (31, 200), (640, 480)):
        features = processor.process(Image.new("RGB", size, "red"))
        assert features["pixel_values"].shape == (1, 3, 56, 56)


def test_models_that_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        family_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(UnsupportedModel, match="bert"):
        family_of(tmp_path)


def test_the_fingerprint_follows_the_settings(tmp_path: Path) -> None:
    prints = set()
    for longest_edge in (28224, 28225):
        Qwen2VLImageProcessorPil(
            size={"shortest_edge": 3136, "longest_edge": longest_edge}
        ).save_pretrained(tmp_path)
        prints.add(fingerprint(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    prints.add(fingerprint(tmp_path))
    assert len(prints) == 3
