"""Images as files again: the pixels of the files, and the bounds of their plans."""

from __future__ import annotations

import io
from typing import Any, Literal

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from PIL import Image

from afferent.errors import UnsupportedMedia
from afferent.media.decoded import DecodedAudio, DecodedImage
from afferent.media.families.reencoded import FILE, ReencodedFamily
from afferent.media.families.registry import AnyFamily
from afferent.media.headers.media_types import media_type_of
from afferent.media.headers.probe import ImageHeader
from afferent.types import Modality
from tests import media_files
from tests.images import encoded, photo

Kind = Literal["png", "jpeg"]


def file_of(family: ReencodedFamily, pixels: Any) -> bytes:
    """Return the file of an image, which has to be as large as its plan says."""
    plan, write = family.making(DecodedImage(pixels))
    assert plan.nbytes <= family.plan(ImageHeader(pixels.shape[1], pixels.shape[0])).nbytes
    out = {FILE: np.zeros(plan.specs[FILE].shape, np.uint8)}
    write(out)
    return out[FILE].tobytes()


def opened(file: bytes) -> Any:
    with Image.open(io.BytesIO(file)) as image:
        return np.asarray(image)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 90), st.integers(2, 90), st.integers(1, 256), st.integers(0, 99))
def test_png_has_the_pixels_and_fits_its_bound(
    width: int, height: int, num_values: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, num_values, size=(height, width, 3)).astype(np.uint8)
    np.testing.assert_array_equal(opened(file_of(ReencodedFamily(), pixels)), pixels)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 90), st.integers(2, 90), st.booleans(), st.integers(0, 99))
def test_jpeg_of_the_worst_noise_fits_its_bound(
    width: int, height: int, is_binary: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, size=(height, width, 3)).astype(np.uint8)
    if is_binary:
        pixels = np.where(pixels < 128, 0, 255).astype(np.uint8)
    file = file_of(ReencodedFamily(format="jpeg"), pixels)
    assert opened(file).shape == pixels.shape


def test_jpeg_is_close_to_the_image() -> None:
    pixels = np.asarray(photo(120, 80))
    difference = opened(file_of(ReencodedFamily(format="jpeg"), pixels)).astype(int) - pixels
    assert np.abs(difference).mean() < 4


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 5000), st.integers(2, 5000), st.integers(1, 10**7))
def test_size_is_within_the_limit_and_keeps_the_ratio(
    width: int, height: int, max_pixels: int
) -> None:
    family = ReencodedFamily(max_pixels=max_pixels)
    new_width, new_height = family.size(width, height)
    assert min(new_width, new_height) >= 1
    if width * height <= max_pixels:
        assert (new_width, new_height) == (width, height)
    elif min(new_width, new_height) > 1:
        assert new_width * new_height <= max_pixels
        assert abs(new_width / width - new_height / height) <= 1 / min(width, height)


@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_large_image_is_resized_as_by_pillow(kind: Kind) -> None:
    image = photo(300, 200)
    family = ReencodedFamily(format=kind, max_pixels=150 * 100)
    file = opened(file_of(family, np.asarray(image)))
    expected = np.asarray(image.resize((150, 100), Image.Resampling.LANCZOS))
    assert file.shape == expected.shape
    assert np.abs(file.astype(int) - expected).max() <= (0 if kind == "png" else 40)


def test_family_travels_between_processes() -> None:
    family = ReencodedFamily(format="jpeg", max_pixels=7)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(family), type=AnyFamily)
    assert again == family


def test_other_media_are_unsupported() -> None:
    with pytest.raises(UnsupportedMedia):
        ReencodedFamily().making(DecodedAudio(np.zeros(9, np.float32), 16_000))


def sound(form: str) -> bytes:
    return media_files.make_audio(media_files.tone(0.1), 16_000, form)


@pytest.mark.parametrize(
    ("modality", "file", "expected"),
    [
        (Modality.IMAGE, encoded(photo(9, 9), "PNG"), "image/png"),
        (Modality.IMAGE, encoded(photo(9, 9), "WEBP"), "image/webp"),
        (Modality.IMAGE, encoded(photo(9, 9), "BMP"), "image/bmp"),
        (Modality.IMAGE, encoded(photo(9, 9), "JPEG2000"), "image/jp2"),
        (Modality.IMAGE, b"nothing", "application/octet-stream"),
        (Modality.AUDIO, sound("WAV"), "audio/wav"),
        (
            Modality.AUDIO,
            sound("MP3"),
            "audio/mpeg",
        ),
        (
            Modality.AUDIO,
            sound("FLAC"),
            "audio/flac",
        ),
        (Modality.AUDIO, sound("OGG"), "audio/ogg"),
        (Modality.AUDIO, b"", "audio/wav"),
        (Modality.VIDEO, media_files.make_video(num_frames=2), "video/mp4"),
    ],
)
def test_media_type_follows_from_the_first_bytes(
    modality: Modality, file: bytes, expected: str
) -> None:
    assert media_type_of(modality, file) == expected
