"""The adapter for models without a family: their own processor, in workers and at the start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import AutoProcessor

from afferent.errors import (
    ConfigError,
    InternalError,
    InvalidMedia,
    UnsupportedMedia,
    UnsupportedModel,
)
from afferent.media.decoded import DecodedAudio, DecodedImage
from afferent.media.families import adapter, reference
from afferent.media.families.adapter import AdapterFamily
from afferent.media.families.family import MediaTokens
from afferent.media.families.measure import measure
from afferent.media.families.qwen_vl import QwenVlFamily
from afferent.media.families.registry import describe
from afferent.media.headers.probe import AudioHeader, ImageHeader
from afferent.media.workers.discover import family_of
from tests.media.folders import (
    decoded_images,
    make_gemma3,
    make_idefics3,
    make_internvl,
    make_qwen,
    write_config,
)

SIZES = [(100, 60), (31, 200), (2, 2), (224, 224), (300, 299)]


def make_pan_and_scan(folder: Path) -> None:
    """Make a Gemma 3 that crops long images in its image processor alone, not in the whole one."""
    make_gemma3(
        folder,
        size={"height": 56, "width": 56},
        do_pan_and_scan=True,
        pan_and_scan_min_crop_size=16,
        pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.2,
    )


@pytest.mark.parametrize("make", [make_idefics3, make_pan_and_scan])
def test_plans_and_features_are_the_processors(make: object, tmp_path: Path) -> None:
    assert callable(make)
    make(tmp_path)
    assert describe(tmp_path) is None
    family = measure(tmp_path)
    assert family.native is None
    assert family.plan(ImageHeader(64, 64)) is None
    whole = AutoProcessor.from_pretrained(tmp_path)
    text = whole.tokenizer.convert_ids_to_tokens
    marker, embed = text(family.image.marker), text(family.image.embed)
    several = 0
    for decoded in decoded_images(seed=7, count=20):
        plan = family.reference().plan(decoded.header)
        out = {n: np.full(s.shape, 77, np.dtype(s.dtype)) for n, s in plan.specs.items()}
        family.process(decoded, out)
        image = Image.fromarray(decoded.pixels)
        made = whole(text=f"Look: {marker}", images=image, return_tensors="np")
        assert set(out) == set(made) - {"input_ids", "attention_mask", "token_type_ids"}
        for name, array in out.items():
            np.testing.assert_array_equal(array, made[name])
        written = "".join(p if isinstance(p, str) else embed * p for p in plan.prompt)
        ids = whole.tokenizer(f"Look: {written}")["input_ids"]
        assert ids == np.asarray(made["input_ids"])[0].tolist()
        assert plan.num_embeds == ids.count(family.image.embed)
        assert family.model_inputs(out) == out
        several += len(plan.prompt) > 3
    assert (several > 5) == (make is make_idefics3)


def test_a_family_that_is_measured_in_another_process(tmp_path: Path) -> None:
    make_idefics3(tmp_path)
    family = family_of(tmp_path)
    assert isinstance(family, AdapterFamily)
    assert family == measure(tmp_path)


def test_a_known_family_is_not_measured(tmp_path: Path) -> None:
    make_qwen(tmp_path)
    family = family_of(tmp_path, reference=True)
    assert isinstance(family, AdapterFamily)
    assert isinstance(family.native, QwenVlFamily)
    assert family.native == family_of(tmp_path)
    for width, height in SIZES:
        plan = family.plan(ImageHeader(width, height))
        assert plan == family.reference().plan(ImageHeader(width, height))
        assert plan is not None
        assert plan.prompt == family.native.plan(ImageHeader(width, height)).prompt


def test_features_that_were_not_planned(tmp_path: Path) -> None:
    make_qwen(tmp_path)
    family = describe(tmp_path, reference=True)
    assert family is not None
    decoded = DecodedImage(np.zeros((56, 56, 3), np.uint8))
    with pytest.raises(InternalError, match="planned"):
        family.process(decoded, {"pixel_values": np.zeros((1, 3), np.float32)})


def test_models_that_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        family_of(tmp_path)
    write_config(tmp_path, model_type="bert")
    with pytest.raises(UnsupportedModel, match="bert"):
        measure(tmp_path)
    make_internvl(tmp_path, do_resize=False)  # no family supports this setting
    with pytest.raises(UnsupportedModel, match="torchvision"):
        family_of(tmp_path)


def test_other_media_than_images(tmp_path: Path) -> None:
    make_qwen(tmp_path)
    family = describe(tmp_path, reference=True)
    assert isinstance(family, AdapterFamily)
    header = AudioHeader(16_000, 1, 5)
    with pytest.raises(UnsupportedMedia):
        family.plan(header)
    with pytest.raises(UnsupportedMedia):
        family.plan_exactly(header)
    with pytest.raises(UnsupportedMedia):
        family.process(DecodedAudio(np.zeros(5, np.float32), 16_000), {})
    assert set(family.tokens.values()) == {MediaTokens(5, 5)}
    assert family.sample_rate_hz == 0


@pytest.mark.parametrize("make", [make_idefics3, make_pan_and_scan])
def test_image_that_the_processor_refuses_is_the_clients_fault(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    family = measure(tmp_path)
    image = DecodedImage(np.zeros((64, 64, 3), np.uint8))
    plan = family.plan_exactly(image.header)
    out = {name: np.zeros(spec.shape, np.dtype(spec.dtype)) for name, spec in plan.specs.items()}

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("the aspect ratio is very extreme")

    monkeypatch.setattr(family.reference()._processor, "run", refuse)
    with pytest.raises(InvalidMedia, match=r"refuses the image: .*very extreme"):
        family.process(image, out)


def test_many_bounds_of_clients_load_one_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_qwen(tmp_path)
    native = describe(tmp_path)
    assert isinstance(native, QwenVlFamily)
    family = AdapterFamily(folder=str(tmp_path), native=native, image=native.image)
    loaded: list[object] = []
    monkeypatch.setattr(reference, "_load", lambda *given: loaded.append(given) or dict)
    reference.load_images.cache_clear()
    for max_pixels in range(4000, 4000 + 3 * adapter._MAX_REFERENCES):
        family.bounded(max_pixels * 100).reference()
    assert len(loaded) == 1
    assert adapter._reference.cache_info().currsize <= adapter._MAX_REFERENCES
