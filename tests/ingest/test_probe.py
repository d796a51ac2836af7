from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from afferent.config import ServeConfig
from afferent.errors import InvalidMedia, MediaTooLarge
from afferent.ingest.probe import ImageHeader, probe_image
from afferent.preprocess.decode import decode_image

LIMITS = ServeConfig()


def encoded(image: Image.Image, format: str, **parameters: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format, **parameters)
    return out.getvalue()


def corner_colours(image: Image.Image) -> list[str]:
    """The names of the colours in the four corners, in reading order."""
    names = {
        (255, 0, 0): "red",
        (0, 255, 0): "green",
        (0, 0, 255): "blue",
        (255, 255, 255): "white",
    }
    width, height = image.size
    found = [
        image.getpixel(at)
        for at in ((2, 2), (width - 3, 2), (2, height - 3), (width - 3, height - 3))
    ]
    return [min(names, key=lambda rgb: np.abs(np.subtract(rgb, pixel)).sum()) for pixel in found]


def four_corners() -> Image.Image:
    image = Image.new("RGB", (60, 40))
    for box, colour in (
        ((0, 0, 30, 20), "red"),
        ((30, 0, 60, 20), "lime"),
        ((0, 20, 30, 40), "blue"),
        ((30, 20, 60, 40), "white"),
    ):
        image.paste(colour, box)
    return image


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(format: str, orientation: int) -> None:
    """Whatever way the file is turned, its header gives the upright size, and decoding agrees."""
    upright = four_corners()
    turn_back = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(turn_back[orientation]) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(stored, format, exif=exif.tobytes(), quality=95)
    header = probe_image(data, LIMITS)
    assert header == ImageHeader(60, 40, orientation)
    pixels = decode_image(memoryview(data), header)
    assert pixels.size == (60, 40)
    assert corner_colours(pixels) == corner_colours(upright)


@pytest.mark.parametrize("value", [0, 9, 255])
def test_orientations_that_do_not_exist(value: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    data = encoded(four_corners(), "JPEG", exif=exif.tobytes())
    assert probe_image(data, LIMITS) == ImageHeader(60, 40, 1)


def test_modes() -> None:
    """Every mode becomes RGB; what is transparent is white, as on a page."""
    clear = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    palette = four_corners().quantize(4)
    cases = {
        "1": Image.new("1", (8, 8), 1),
        "L": Image.new("L", (8, 8), 128),
        "LA": Image.new("LA", (8, 8), (0, 0)),
        "RGBA": clear,
        "P": palette,
        "I;16": Image.fromarray(np.full((8, 8), 0x8080, np.uint16)),
    }
    expected = {"1": 255, "L": 128, "LA": 255, "RGBA": 255, "I;16": 128}
    for mode, image in cases.items():
        data = encoded(image, "PNG")
        pixels = decode_image(memoryview(data), probe_image(data, LIMITS))
        assert pixels.mode == "RGB"
        if mode in expected:
            assert pixels.getpixel((4, 4)) == (expected[mode],) * 3, mode
    cmyk = encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")
    red = decode_image(memoryview(cmyk), probe_image(cmyk, LIMITS)).getpixel((4, 4))
    assert red[0] > 200 > 60 > red[1]


def test_first_frame_of_an_animation() -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    pixels = decode_image(memoryview(data), probe_image(data, LIMITS))
    assert pixels.getpixel((8, 8)) == (255, 0, 0)


def test_limits() -> None:
    data = encoded(Image.new("RGB", (300, 200)), "PNG")
    for limits, word in (
        (ServeConfig(max_image_nbytes=len(data) - 1), "bytes"),
        (ServeConfig(max_image_pixels=59_999), "pixels"),
        (ServeConfig(max_image_side=299), "side"),
        (ServeConfig(max_image_aspect=1), "factor"),
    ):
        with pytest.raises(MediaTooLarge, match=word):
            probe_image(data, limits)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF"])
def test_truncation_at_every_byte(format: str, rng: np.random.Generator) -> None:
    """A header is whole or refused, and what it says is what decoding sees or refuses."""
    noise = Image.fromarray(rng.integers(0, 255, (24, 20, 3), dtype=np.uint8))
    data = encoded(noise, format)
    whole = probe_image(data, LIMITS)
    decoded = 0
    for length in range(len(data)):
        cut = data[:length]
        try:
            header = probe_image(cut, LIMITS)
            assert header == whole
            decoded += decode_image(memoryview(cut), header).size == (20, 24)
        except InvalidMedia:
            pass
    # Some formats end with bytes that carry no pixel.
    assert decoded <= 20


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF"])
def test_flipped_bits(format: str, rng: np.random.Generator) -> None:
    good = encoded(four_corners(), format)
    for _ in range(400):
        data = bytearray(good)
        for at in rng.integers(0, len(data), 3):
            data[at] ^= 1 << int(rng.integers(8))
        try:
            header = probe_image(bytes(data), LIMITS)
            pixels = decode_image(memoryview(data), header)
        except InvalidMedia:
            continue
        assert pixels.size == (header.width, header.height)


def test_probing_decodes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import ImageFile

    def refuse(*_: object) -> None:
        raise AssertionError("pixels were decoded")

    exif = Image.Exif()
    exif[0x0112] = 6
    files = [encoded(four_corners(), f, exif=exif.tobytes()) for f in ("JPEG", "PNG")]
    files.append(encoded(four_corners(), "GIF"))
    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    for data in files:
        assert probe_image(data, LIMITS)


@pytest.mark.parametrize(
    "padding",
    [
        pytest.param(b"\xff" * 900_000, id="fill bytes"),
        pytest.param(b"\xff\xe7\x00\x02" * 200_000, id="empty segments"),
        pytest.param(b"\xff\x01" * 400_000, id="markers without data"),
    ],
)
def test_headers_without_end(padding: bytes) -> None:
    """A header that goes on and on is refused before it costs time on the event loop."""
    whole = encoded(four_corners(), "JPEG")
    with pytest.raises(InvalidMedia):
        probe_image(whole[:2] + padding + whole[2:], LIMITS)
    png = encoded(four_corners(), "PNG")
    chunk = struct.pack(">I", 0) + b"teSt" + struct.pack(">I", zlib.crc32(b"teSt"))
    with pytest.raises(InvalidMedia, match="chunks"):
        probe_image(png[:33] + chunk * 70_000 + png[33:], LIMITS)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("exif", [b"Exif\0\0II*\0", b"Exif\0\0" + b"\xff" * 60, b"Exif\0\0MM"])
def test_broken_exif_is_no_orientation(format: str, exif: bytes) -> None:
    data = encoded(four_corners(), format, exif=exif)
    assert probe_image(data, LIMITS) == ImageHeader(60, 40, 1)


@pytest.mark.parametrize("lossless", [True, False])
@pytest.mark.parametrize("size", [(2, 2), (16, 9), (1023, 5), (300, 1000)])
def test_webp_sizes(lossless: bool, size: tuple[int, int]) -> None:
    for parameters in ({}, {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"}):
        data = encoded(Image.new("RGB", size, "red"), "WEBP", lossless=lossless, **parameters)
        assert probe_image(data, ServeConfig(max_image_aspect=1000)) == ImageHeader(*size)
