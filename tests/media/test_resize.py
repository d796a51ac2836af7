"""Resizing with the compiled part and with libraries, against Pillow's and torchvision's rules."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from afferent.media import native
from afferent.media.decoded import Array
from afferent.media.families.qwen_vl import QwenVlFamily
from afferent.media.families.registry import describe
from afferent.media.transforms.patches import patch_views
from afferent.media.transforms.resize import Resampling
from afferent.media.transforms.weights import AS_IT_IS, Table
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from tests.media.folders import draw_pixels
from tests.media.variants import VARIANTS, assert_ends_well

NUM_CASES, NUM_STORM_CASES = 100, 5_000
MODEL = BUILT_IN_MODELS / "shapes"
FILTERS = list(Image.Resampling)
BICUBIC = Resampling(int(Image.Resampling.BICUBIC))

needs_compiled = pytest.mark.skipif(native.compiled is None, reason="there is no compiled part")


@pytest.fixture(params=[*VARIANTS, "libraries"])
def part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select the implementation of the resizing."""
    if request.param == "libraries":
        monkeypatch.setattr(native, "compiled", None)
    else:
        monkeypatch.setattr(native, "variant", request.param)
    return str(request.param)


def some_size(rng: np.random.Generator) -> tuple[int, int]:
    """Draw a size, often a tiny one, to find reads beyond the end of a row or of the image."""
    most = int(rng.choice([5, 40, 300]))
    return int(rng.integers(1, most)), int(rng.integers(1, most))


@pytest.mark.parametrize("resample", FILTERS, ids=lambda each: each.name)
def test_resizing_is_pillows_to_the_bit(resample: Image.Resampling, part: str) -> None:
    """The results with and without the compiled part have the same cache key."""
    rng = np.random.default_rng(int(resample) + 100)
    for index in range(150):
        pixels = draw_pixels(rng, *some_size(rng), index % 3)
        if index % 2:
            pixels = pixels // 128 * 255
        size = some_size(rng)
        expected = np.asarray(Image.fromarray(pixels).resize(size, resample))
        made = Resampling(int(resample)).resize(pixels, *size)
        np.testing.assert_array_equal(made, expected, err_msg=f"{pixels.shape} to {size}")


def test_large_images_are_pillows_to_the_bit(part: str) -> None:
    """Large images are resized in strips, with a few weights or with hundreds for each pixel."""
    rng = np.random.default_rng(8)
    sizes = ((700, 1900), (690, 1910)), ((3000, 500), (10, 490)), ((60, 4000), (50, 7))
    for (width, height), size in sizes:
        pixels = rng.integers(0, 256, (height, width, 3), np.uint8)
        expected = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
        np.testing.assert_array_equal(BICUBIC.resize(pixels, *size), expected)


@needs_compiled
@pytest.mark.parametrize(
    "change",
    [
        {"pixels": np.zeros((4, 5, 4), np.uint8)},
        {"pixels": np.zeros((4, 5, 3), np.uint16)},
        {"pixels": np.zeros((0, 5, 3), np.uint8)},
        {"pixels": np.zeros((4, 10, 3), np.uint8)[:, ::2]},
        {"across": (np.array([0, 4], np.int32), np.ones((2, 2), np.int32), 8)},
        {"across": (np.array([-1, 3], np.int32), np.ones((2, 2), np.int32), 8)},
        {"across": (np.array([3, 0], np.int32), np.ones((2, 2), np.int32), 8)},
        {"across": (np.array([0, 3], np.int32), np.ones(3, np.int32), 8)},
        {"across": (np.array([0, 3], np.int32), None, 8)},
        {"across": (np.array([0, 3], np.int32), np.ones((2, 2), np.int32), 0)},
        {"across": (np.array([0, 3], np.int32), np.ones((2, 2), np.int32), 31)},
        {"down": (np.zeros(0, np.int32), np.ones(0, np.int32), 8)},
        {"out": np.zeros((3, 4, 2), np.uint16)},
        {"out": np.zeros((3, 4, 3), np.uint8)},
        {"out": np.zeros((3, 4, 2, 1), np.uint8)},
        {"out": np.zeros((4, 4, 2), np.uint8)},
        {"out": np.zeros((3, 0, 2), np.uint8)},
        {"across": (np.array([0, 3], np.int32), np.full((2, 2), 0x7F7F80, np.int32), 8)},
        {"across": (np.array([0, 3], np.int32), np.full((2, 2), -0x7F7F80, np.int32), 8)},
        {"variant": "avx1024"},
    ],
    ids=str,
)
def test_what_would_lead_outside_is_refused(change: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "pixels": np.zeros((4, 5, 3), np.uint8),
        "across": (np.array([0, 3], np.int32), np.full((2, 2), 128, np.int32), 8),
        "down": AS_IT_IS,
        "out": np.zeros((3, 4, 2), np.uint8),
        "variant": native.variant,
    }
    assert native.compiled is not None
    native.compiled.resample(*given.values())
    with pytest.raises(ValueError, match=r"."):
        native.compiled.resample(*(given | change).values())


@needs_compiled
def test_what_can_not_be_written_is_refused() -> None:
    out = np.zeros((3, 4, 5), np.uint8)
    out.flags.writeable = False
    assert native.compiled is not None
    pixels = np.zeros((4, 5, 3), np.uint8)
    with pytest.raises((BufferError, ValueError)):
        native.compiled.resample(pixels, AS_IT_IS, AS_IT_IS, out, native.variant)


def drawn_table(rng: np.random.Generator, length: int) -> Table:
    """Draw positions of any distance, and weights of any size, but few at the same time."""
    if rng.random() < 0.1:
        return AS_IT_IS
    taps = int(rng.integers(1, min(length, 40) + 1))
    size, reach = int(rng.integers(1, 200)), int(rng.integers(0, length - taps + 1))
    starts = np.sort(rng.integers(0, reach + 1, size)) + int(
        rng.integers(0, length - taps - reach + 1)
    )
    most = int(rng.choice([0x7F, 0x7F7F, 0x7F80, 0x8000, 0x7F7F7F]))
    weights = rng.integers(-most, most + 1, (size, taps))
    weights[rng.random((size, taps)) < 0.2] = most * int(rng.choice([-1, 1]))
    return starts.astype(np.int32), weights.astype(np.int32), int(rng.integers(1, 31))


def weighed(values: Array, table: Table) -> Array:
    """Return sums along the first dimension that wrap at 32 bits, rounded and cut to bytes."""
    starts, weights, shift = table
    if starts is None or weights is None:
        return values
    sums = np.full((len(starts), *values.shape[1:]), 1 << (shift - 1), np.uint32)
    for tap in range(weights.shape[1]):
        factors = weights[:, tap].view(np.uint32).reshape(-1, *[1] * (values.ndim - 1))
        sums += factors * values[starts + tap].astype(np.uint32)
    return np.clip(sums.view(np.int32) >> shift, 0, 255).astype(np.uint8)


def drawn_source(rng: np.random.Generator) -> Array:
    """Draw pixels: close together, by planes, a part of a larger picture, or upside down."""
    rows, columns = int(rng.integers(1, 90)), int(rng.integers(1, rng.choice([9, 130, 3000])))
    pixels = rng.integers(0, 256, (rows + 2, columns + 2, 3), np.uint8)
    match int(rng.integers(4)):
        case 0:
            return pixels[1:-1, 1:-1]
        case 1:
            return np.ascontiguousarray(pixels[1:-1, 1:-1])
        case 2:
            return np.ascontiguousarray(pixels.transpose(2, 0, 1)).transpose(1, 2, 0)[1:-1, 1:-1]
        case _:
            return pixels[::-1]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("variant", VARIANTS)
def test_resample_any_table_gives_the_sums(variant: str, request: pytest.FixtureRequest) -> None:
    rng = np.random.default_rng(11)
    assert native.compiled is not None
    num_cases = NUM_STORM_CASES if request.config.getoption("--storm") else NUM_CASES
    for index in range(num_cases):
        pixels = drawn_source(rng)
        across, down = (drawn_table(rng, length) for length in (pixels.shape[1], pixels.shape[0]))
        wide = weighed(pixels.transpose(1, 0, 2), across).transpose(1, 0, 2)
        expected = weighed(wide, down).transpose(2, 0, 1)
        channels, rows, columns = expected.shape
        whole = np.full((channels, rows, 2 * columns + 2), 77, np.uint8)
        out = whole[..., 1:-1:2] if index % 2 else whole[..., 1 : columns + 1]
        native.compiled.resample(pixels, across, down, out, variant)
        np.testing.assert_array_equal(out, expected, err_msg=f"case {index}, {pixels.shape}")
        out[...] = 77
        assert (whole == 77).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("span", [63, 64, 65, 127, 128, 129])
def test_resample_span_at_the_edge_of_a_register_gives_the_sums(variant: str, span: int) -> None:
    """AVX-512 reads the neighbours of sixteen outputs at once, if 128 bytes hold the first four."""
    rng = np.random.default_rng(span)
    pixels = rng.integers(0, 256, (3, span + 4, 3), np.uint8)
    starts = np.repeat(np.array([0, span - 4], np.int32), [15, 10])
    across = (starts, rng.integers(200, 999, (25, 8)).astype(np.int32), 13)
    out = np.empty((3, 3, 25), np.uint8)
    assert native.compiled is not None
    native.compiled.resample(pixels, across, AS_IT_IS, out, variant)
    expected = weighed(pixels.transpose(1, 0, 2), across).transpose(2, 1, 0)
    np.testing.assert_array_equal(out, expected)


GUARDED = """
from afferent.media.transforms import weights

memory = before_a_guarded_page()
for columns in range(1, 200):
    whole = memory[-6 * columns :]
    for pixels in (
        whole.reshape(2, columns, 3),
        whole.reshape(3, 2, columns).transpose(1, 2, 0),
    ):
        for width in (columns, columns // 5 + 1, columns // 2 + 1, 2 * columns):
            out = np.zeros((3, 2, width), np.uint8)
            across = weights.table(columns, width, 3, "pillow")
            native.compiled.resample(pixels, across, weights.AS_IT_IS, out, sys.argv[1])
"""


@pytest.mark.parametrize("variant", VARIANTS)
def test_resample_source_before_a_guarded_page_reads_nothing_behind(variant: str) -> None:
    assert_ends_well(GUARDED, variant)


@pytest.mark.parametrize("first", ["width", "height"])
def test_the_order_of_the_two_directions_is_pillows(first: str, part: str) -> None:
    """Values are clipped between the passes, so the other order would give other results."""
    noise = np.random.default_rng(0).integers(0, 2, (200, 200, 3)).astype(np.uint8) * 255
    size = (110, 150) if first == "width" else (150, 50)
    expected = np.asarray(Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(BICUBIC.resize(noise, *size), expected)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "lanczos"])
def test_torchvisions_rule(mode: str, part: str) -> None:
    """Each channel is resized as in torchvision, for any factor."""
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


def test_pixels_lie_as_they_like(part: str) -> None:
    """Pixels may be planes, a part of a larger image, or reversed."""
    whole = np.random.default_rng(3).integers(0, 256, (50, 70, 3), np.uint8)
    expected = BICUBIC.resize(np.ascontiguousarray(whole[4:44, 5:65]), 30, 20)
    planes = np.ascontiguousarray(whole.transpose(2, 0, 1)).transpose(1, 2, 0)
    for pixels in (whole, planes):
        assert (BICUBIC.resize(pixels[4:44, 5:65], 30, 20) == expected).all()
    assert (BICUBIC.resize(whole[::-1], 70, 50) == whole[::-1]).all()
    turned = whole[:, ::-1]
    assert (BICUBIC.resize(turned, 30, 40) == BICUBIC.resize(turned.copy(), 30, 40)).all()


@pytest.mark.parametrize("size", [(12, 8), (7, 5), (40, 90)], ids=str)
def test_patches(size: tuple[int, int], part: str) -> None:
    """Patches of images that are resized, and of one that already has the right size."""
    patch, merge, frames = 2, 2, 2
    images = np.random.default_rng(1).integers(0, 256, (frames, size[1], size[0], 3), np.uint8)
    out = np.zeros((24, 3 * frames * patch**2), np.uint8)
    views = patch_views(out, 4, 6, patch_size=patch, merge_size=merge, num_frames=frames)
    for image, view in zip(images, views, strict=True):
        BICUBIC.write(image, view)
    places = [
        (row * merge + below, column * merge + right)
        for row in range(2)
        for column in range(3)
        for below in range(merge)
        for right in range(merge)
    ]
    expected = np.stack([BICUBIC.resize(image, 12, 8) for image in images])
    for values, (row, column) in zip(out, places, strict=True):
        cut = expected[:, row * patch :, column * patch :][:, :patch, :patch]
        assert (values.reshape(3, frames, patch, patch) == cut.transpose(3, 0, 1, 2)).all()


def test_patches_are_written_in_place(part: str) -> None:
    """The strides of the target do not matter."""
    pixels = np.arange(4 * 4 * 3, dtype=np.uint8).reshape(4, 4, 3)
    whole, scattered = np.zeros((4, 12), np.uint8), np.zeros((24, 4), np.uint8).T[:, ::2]
    for out in (whole, scattered):
        BICUBIC.write(pixels, patch_views(out, 2, 2, patch_size=2, merge_size=2)[0])
    assert whole.any()
    assert (whole == scattered).all()


@pytest.mark.parametrize(("rule", "needs_torch"), [("pillow", False), ("torchvision", True)])
def test_torch_is_loaded_only_where_it_resizes(rule: str, needs_torch: bool) -> None:
    """Without torch, a pool of workers starts a second sooner."""
    lines = (
        "import sys, numpy as np",
        "from afferent.media import native",
        "from afferent.media.transforms import resize",
        f"resampling = resize.Resampling(3, {rule!r})",
        "pixels = np.zeros((9, 9, 3), np.uint8)",
        "if native.compiled: resize.load(resampling), resampling.resize(pixels, 5, 5)",
        "print('torch' in sys.modules)",
        "native.compiled = None",
        "resize.load(resampling)",
        "print('torch' in sys.modules)",
        "resampling.resize(pixels, 5, 5)",
        "print('torch' in sys.modules)",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert said == ["False", str(needs_torch), str(needs_torch)]
