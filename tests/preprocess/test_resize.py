"""Our resizing against Pillow's, and against torchvision's rule."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image

from afferent.preprocess.families.qwen_vl import QwenVlFamily
from afferent.preprocess.patches import write_patches
from afferent.preprocess.registry import describe
from afferent.preprocess.resize import Resampling
from afferent.server.checks import BUILT_IN_MODELS
from tests.preprocess.folders import draw_pixels, draw_size

MODEL = BUILT_IN_MODELS / "shapes"
FILTERS = list(Image.Resampling)
BICUBIC = Resampling(int(Image.Resampling.BICUBIC))


@pytest.mark.parametrize("resample", FILTERS, ids=lambda each: each.name)
def test_resizing_is_pillows(resample: Image.Resampling) -> None:
    """Noise of two values is the worst that can be resized: it is in here."""
    rng = np.random.default_rng(int(resample))
    num_values = num_far = 0
    for index in range(120):
        width, height = draw_size(rng)
        pixels = draw_pixels(rng, width, height, index % 3)
        if index % 2:
            pixels = pixels // 128 * 255
        scale, stretch = math.exp(rng.uniform(-2.0, 1.0)), math.exp(rng.normal(0.0, 0.3))
        size = max(1, int(width * scale * stretch)), max(1, int(height * scale / stretch))
        expected = np.asarray(Image.fromarray(pixels).resize(size, resample))
        resized = Resampling(int(resample)).resize(pixels, *size)
        apart = np.abs(resized.astype(np.int16) - expected)
        assert apart.max() <= 2
        num_values, num_far = num_values + apart.size, num_far + np.count_nonzero(apart > 1)
    assert num_far <= 1e-4 * num_values


@pytest.mark.parametrize("first", ["width", "height"])
def test_the_order_of_the_two_directions_is_pillows(first: str) -> None:
    """Values are clipped between them, so the other order would be far off."""
    noise = np.random.default_rng(0).integers(0, 2, (200, 200, 3)).astype(np.uint8) * 255
    size = (110, 150) if first == "width" else (150, 50)
    expected = np.asarray(Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC))
    resized = BICUBIC.resize(noise, *size)
    assert np.abs(resized.astype(np.int16) - expected).max() <= 2


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "lanczos"])
def test_torchvisions_rule(mode: str) -> None:
    """Channel by channel, as torchvision is given an image; whatever it is enlarged by."""
    rng = np.random.default_rng(5)
    resampling = Resampling(int(Image.Resampling[mode.upper()]), "torchvision")
    for index in range(40):
        width, height = (int(side) for side in rng.integers(2, 300, 2))
        size = tuple(int(side) for side in rng.integers(2, 600, 2))
        pixels = draw_pixels(rng, width, height, index % 3)
        channels = torch.from_numpy(pixels).permute(2, 0, 1)[None].contiguous()
        made = torch.nn.functional.interpolate(
            channels, size=size[::-1], mode=mode, antialias=True, align_corners=False
        )
        expected = made[0].permute(1, 2, 0).numpy()
        assert (resampling.resize(pixels, *size) == expected).all()


def test_a_rule_is_all_of_a_familys() -> None:
    pillow, other = describe(MODEL), describe(MODEL, resize_rule="torchvision")
    assert isinstance(pillow, QwenVlFamily)
    assert isinstance(other, QwenVlFamily)
    assert pillow.video
    assert other.video
    assert (pillow.resampling.rule, pillow.video.resampling.rule) == ("pillow", "pillow")
    assert (other.resampling.rule, other.video.resampling.rule) == ("torchvision", "torchvision")
    assert other.resizing("pillow") == pillow


def test_filters_that_torchvision_has_not_are_pillows() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    box = Image.Resampling.BOX
    expected = np.asarray(Image.fromarray(pixels).resize((30, 20), box))
    assert (Resampling(int(box), "torchvision").resize(pixels, 30, 20) == expected).all()


def test_pixels_of_the_right_size_are_left_alone() -> None:
    pixels = np.zeros((4, 6, 3), np.uint8)
    assert BICUBIC.resize(pixels, 6, 4) is pixels


def test_read_only_pixels() -> None:
    pixels = np.full((40, 60, 3), 7, np.uint8)
    pixels.flags.writeable = False
    assert (BICUBIC.resize(pixels, 30, 20) == 7).all()


def test_patches() -> None:
    patch, merge = 2, 2
    pixels = np.arange(8 * 12 * 3, dtype=np.uint8).reshape(8, 12, 3)
    out = np.zeros((24, 12), np.uint8)
    write_patches(pixels, out, patch_size=patch, merge_size=merge)
    places = [
        (row * merge + below, column * merge + right)
        for row in range(2)
        for column in range(3)
        for below in range(merge)
        for right in range(merge)
    ]
    for values, (row, column) in zip(out, places, strict=True):
        cut = pixels[row * patch :, column * patch :][:patch, :patch]
        assert (values.reshape(3, patch, patch) == cut.transpose(2, 0, 1)).all()


def test_patches_are_written_in_place() -> None:
    """Whatever the strides of what they are written to."""
    pixels = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 3)
    whole, scattered = np.zeros((4, 12), np.uint8), np.zeros((24, 4), np.uint8).T[:, ::2]
    for out in (whole, scattered):
        write_patches(pixels, out, patch_size=2, merge_size=2)
    assert whole.any()
    assert (whole == scattered).all()
