"""InternVL's image tiles against the image processor of `transformers`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from afferent.errors import UnsupportedMedia
from afferent.media.decoded import DecodedAudio
from afferent.media.families.internvl import TiledFamily
from afferent.media.families.registry import describe
from afferent.media.headers.probe import AudioHeader
from afferent.types import Modality
from tests.media.folders import decoded_images, make_internvl


@pytest.fixture(params=[{}, {"min_patches": 2, "max_patches": 6}], ids=["usual", "other limits"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make_internvl(tmp_path, size={"height": 28, "width": 28}, **request.param)
    return tmp_path


def known(folder: Path) -> TiledFamily:
    family = describe(folder)
    assert isinstance(family, TiledFamily)
    return family


def test_as_the_processor_cuts_them(folder: Path) -> None:
    family, processor = known(folder), AutoImageProcessor.from_pretrained(folder)
    grids = set()
    num_far = num_values = 0
    for image in decoded_images(seed=2, count=100):
        plan = family.plan(image.header)
        out = {n: np.full(s.shape, 77, np.dtype(s.dtype)) for n, s in plan.specs.items()}
        family.process(image, out)
        expected = processor(
            images=Image.fromarray(image.pixels), crop_to_patches=True, return_tensors="np"
        )
        assert plan.prompt == ("<img>", 4 * int(expected["num_patches"][0]), "</img>")
        tensors = {name: torch.from_numpy(array) for name, array in out.items()}
        ready = family.model_inputs(tensors)["pixel_values"].numpy()
        assert ready.dtype == expected["pixel_values"].dtype
        std = np.array(family.normalization.std)[:, None, None]
        apart = np.abs(ready - expected["pixel_values"]) * std / family.normalization.rescale_factor
        assert apart.max() < 2.01
        num_values, num_far = num_values + apart.size, num_far + int((apart > 1.01).sum())
        grids.add(family.grid(image.header.width, image.header.height))
    assert num_far <= 1e-4 * num_values
    assert len(grids) > 5


def test_settings_that_are_not_done(tmp_path: Path) -> None:
    make_internvl(tmp_path, do_normalize=False, do_rescale=False)
    assert describe(tmp_path) is None
    make_internvl(tmp_path, do_resize=False)
    assert describe(tmp_path) is None


def test_images_only(folder: Path) -> None:
    family = known(folder)
    assert set(family.tokens) == {Modality.IMAGE}
    assert family.sample_rate_hz == 0
    with pytest.raises(UnsupportedMedia):
        family.plan(AudioHeader(16_000, 1, 5))
    with pytest.raises(UnsupportedMedia):
        family.process(DecodedAudio(np.zeros(5, np.float32), 16_000), {})
