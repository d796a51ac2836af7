"""Generated files, from bytes to patches, against Pillow's pixels and the processor's own code.

With ``--storm`` there are 5,000 of them, as many as in the published figures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from afferent.config import Limits
from afferent.media import native
from afferent.media.decode.image import decode_image, read_image_header
from afferent.media.decoded import DecodedImage
from afferent.media.families.qwen_vl import QwenVlFamily
from afferent.media.families.registry import describe
from tests.images import encoded, in_mode, oriented
from tests.media.folders import draw_pixels, draw_size, make_qwen
from tests.media.test_decode_image import by_pillow

NUM_FILES, NUM_STORM_FILES = 150, 5_000
MOST_UNEQUAL = 1e-3
EDGES = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 300}
KINDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("JPEG", "RGB", {"quality": 85}),
    ("JPEG", "RGB", {"quality": 95, "subsampling": 0}),
    ("JPEG", "RGB", {"quality": 60, "progressive": True}),
    ("JPEG", "L", {"quality": 85}),
    ("PNG", "RGB", {}),
    ("PNG", "RGBA", {}),
    ("PNG", "L", {}),
    ("PNG", "P", {}),
    ("WEBP", "RGB", {"quality": 80}),
    ("WEBP", "RGB", {"lossless": True}),
    ("WEBP", "RGBA", {"quality": 80}),
    ("GIF", "P", {}),
)


def drawn_file(rng: np.random.Generator, index: int) -> bytes:
    format, mode, parameters = KINDS[index % len(KINDS)]
    pixels = draw_pixels(rng, *draw_size(rng), index // len(KINDS) % 3)
    turned = {"exif": oriented(int(rng.integers(1, 9)))} if format in ("JPEG", "PNG") else {}
    return encoded(in_mode(Image.fromarray(pixels), mode), format, **parameters, **turned)


def ours(family: QwenVlFamily, data: bytes, variant: str) -> np.ndarray:
    header = read_image_header(data, Limits())
    specs = family.plan(header).specs
    out = {name: np.full(spec.shape, 77, spec.dtype) for name, spec in specs.items()}
    with mock.patch.object(native, "variant", variant):
        family.process(decode_image(memoryview(data), header, Limits()), out)
    return out["pixel_values"]


def theirs(processor: Any, family: QwenVlFamily, pixels: np.ndarray) -> np.ndarray:
    """Return the processor's features, converted from floats back to bytes."""
    made = processor(images=Image.fromarray(pixels), return_tensors="np")["pixel_values"]
    n, channels = family.normalization, made.reshape(len(made), 3, 2, -1)[:, :, 0]
    std, mean = (np.array(each)[:, None] for each in (n.std, n.mean))
    values = (channels * std + mean) / n.rescale_factor
    assert np.abs(values - np.rint(values)).max() < 0.01
    return np.rint(values).astype(np.uint8).reshape(len(made), -1)


def by_torch(family: QwenVlFamily, pixels: np.ndarray) -> np.ndarray:
    """Resize with torch, as torchvision does; cut patches as in the other test."""
    size = family.resized(pixels.shape[1], pixels.shape[0])
    made = torch.nn.functional.interpolate(
        torch.tensor(pixels).permute(2, 0, 1)[None].contiguous(),
        size=size[::-1],
        mode="bicubic",
        antialias=True,
    )
    out = np.empty((size[0] * size[1] // 14**2, 3 * 14**2), np.uint8)
    image = DecodedImage(made[0].permute(1, 2, 0).contiguous().numpy())
    family.process(image, {"pixel_values": out, "image_grid_thw": np.empty((1, 3), np.int64)})
    return out


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rule", ["pillow", "torchvision"])
def test_files_become_what_the_processor_makes_of_them(
    rule: Any, tmp_path: Path, request: pytest.FixtureRequest, record_property: Any
) -> None:
    if rule == "pillow" and native.compiled is None:
        pytest.skip("torch's results are nearly Pillow's: see test_resize")
    make_qwen(tmp_path, size=EDGES)
    family = describe(tmp_path, resize_rule=rule)
    assert isinstance(family, QwenVlFamily)
    processor, rng = Qwen2VLImageProcessorPil.from_pretrained(tmp_path), np.random.default_rng(17)
    num_files = NUM_STORM_FILES if request.config.getoption("--storm") else NUM_FILES
    variants = [native.variant] if native.compiled is None else native.compiled.VARIANTS
    num_unequal = 0
    for index in range(num_files):
        data = drawn_file(rng, index)
        pixels = by_pillow(data)
        made, *others = (ours(family, data, variant) for variant in variants)
        assert all((other == made).all() for other in others), (index, pixels.shape)
        expected = (
            theirs(processor, family, pixels) if rule == "pillow" else by_torch(family, pixels)
        )
        apart = np.abs(made.astype(np.int16) - expected).max()
        assert apart <= 1, (index, KINDS[index % len(KINDS)], pixels.shape)
        num_unequal += int(apart > 0)  # a process of pytest-xdist reports properties
    record_property("unequal", num_unequal)
    print(f"{rule}: {num_unequal} of {num_files} files differ, by 1")
    assert num_unequal <= MOST_UNEQUAL * num_files
