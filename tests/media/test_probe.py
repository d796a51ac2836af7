from __future__ import annotations

import struct
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from afferent.config import ServeConfig
from afferent.errors import InvalidMedia, MediaTooLarge
from afferent.media.decode.image import read_image_header
from afferent.media.headers.header import jpeg_segments
from afferent.media.headers.probe import ImageBound, ImageHeader, probe_image
from tests.callbacks import measured
from tests.collector import frozen
from tests.hostile_images import hostile_images
from tests.images import encoded, oriented, riff_chunk

LIMITS = ServeConfig()


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
@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation(format: str, orientation: int, big_endian: bool) -> None:
    """The size is that of the upright image."""
    exif = oriented(orientation, big_endian=big_endian)
    data = encoded(four_corners(), format, exif=exif)
    size = (60, 40) if orientation < 5 else (40, 60)
    assert probe_image(data, LIMITS) == ImageHeader(*size, orientation)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_orientation_among_other_tags(format: str) -> None:
    exif = Image.Exif()
    for tag in (0x010F, 0x0110, 0x0131, 0x9003):
        exif[tag] = "a text that is longer than four bytes"
    exif[0x0112] = 8
    exif[0x011A] = 72.5
    data = encoded(four_corners(), format, exif=exif.tobytes())
    assert probe_image(data, LIMITS) == ImageHeader(40, 60, 8)


def test_the_first_exif_segment_counts() -> None:
    data = encoded(four_corners(), "JPEG", exif=oriented(6))
    second = encoded(four_corners(), "JPEG", exif=oriented(3))
    at = second.index(b"\xff\xe1")
    (length,) = struct.unpack_from(">H", second, at + 2)
    frame = data.index(b"\xff\xdb")
    data = data[:frame] + second[at : at + 2 + length] + data[frame:]
    assert probe_image(data, LIMITS) == ImageBound(2400)  # Pillow joins them
    assert read_image_header(data, LIMITS) == ImageHeader(40, 60, 6)


@pytest.mark.parametrize("value", [0, 9, 255])
def test_orientations_that_do_not_exist(value: int) -> None:
    data = encoded(four_corners(), "JPEG", exif=oriented(value))
    assert probe_image(data, LIMITS) == ImageHeader(60, 40, 1)


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
    exactly = ServeConfig(
        max_image_nbytes=len(data), max_image_pixels=60_000, max_image_side=300, max_image_aspect=2
    )
    assert probe_image(data, exactly) == ImageHeader(300, 200)


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (5, 1)])
def test_a_side_of_one_pixel(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidMedia, match="at least 2"):
        probe_image(encoded(Image.new("RGB", size), "PNG"), LIMITS)


def test_several_orientations_are_left_to_pillow() -> None:
    """It takes the first."""
    exif = bytearray(oriented(6))
    at = exif.index(struct.pack("<HHI", 0x0112, 3, 1))
    struct.pack_into("<I", exif, at + 4, 2)
    data = encoded(four_corners(), "JPEG", exif=bytes(exif))
    assert probe_image(data, LIMITS) == ImageBound(2400)
    with pytest.warns(UserWarning, match="too many entries"):
        assert read_image_header(data, LIMITS) == ImageHeader(40, 60, 6)


@pytest.mark.parametrize("nbytes", [6, 7])
def test_chunks_of_webp_have_even_lengths(nbytes: int) -> None:
    whole = encoded(four_corners(), "WEBP", exif=oriented(6))
    assert whole[12:16] == b"VP8X"
    before = riff_chunk(b"TEST", b"x" * nbytes)
    assert probe_image(whole[:30] + before + whole[30:], LIMITS) == ImageHeader(40, 60, 6)


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_the_longest_header_that_is_read(format: str) -> None:
    whole = encoded(four_corners(), format)
    if format == "JPEG":
        num_segments = len(list(jpeg_segments(whole)))
        at, step, steps = 2, b"\xff\xe7\x00\x02", 2047 - num_segments
    else:
        at, step, steps = 33, struct.pack(">I4sI", 0, b"teSt", zlib.crc32(b"teSt")), 2047
    for more in (0, 1):
        data = whole[:at] + step * (steps + more) + whole[at:]
        if more:
            with pytest.raises(InvalidMedia, match="too many"):
                probe_image(data, LIMITS)
        else:
            assert probe_image(data, LIMITS) == ImageHeader(60, 40)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF"])
def test_truncation_at_every_byte(format: str, rng: np.random.Generator) -> None:
    """A truncated header is refused, unless the whole header is there."""
    noise = Image.fromarray(rng.integers(0, 255, (24, 20, 3), dtype=np.uint8))
    data = encoded(noise, format)
    for length in range(len(data)):
        try:
            assert probe_image(data[:length], LIMITS) == ImageHeader(20, 24)
        except InvalidMedia:
            assert length < 850


def test_hostile_headers_take_no_time() -> None:
    """Headers are read on an event loop, so any of them may take only some milliseconds."""
    longest_s = 0.0
    files = [data for _, data in hostile_images(seed=2, count=2000)]
    with frozen(), measured() as cost:
        for data in files:
            started_s = time.thread_time()
            try:
                found = probe_image(data, LIMITS)
                assert isinstance(found, ImageBound) or min(found.width, found.height) >= 2
            except InvalidMedia:
                pass
            longest_s = max(longest_s, time.thread_time() - started_s)
    print(f"longest: {longest_s * 1e3:.2f} ms")
    assert longest_s < 0.05 * cost.slowness


def test_probing_decodes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import ImageFile

    def refuse(*_: object) -> None:
        raise AssertionError("pixels were decoded")

    files = [encoded(four_corners(), f, exif=oriented(6)) for f in ("JPEG", "PNG", "WEBP")]
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
    """An endless header is refused before it blocks the event loop."""
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
