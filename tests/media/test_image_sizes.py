"""Bounds for the sizes of images agree with Pillow's sizes."""

from __future__ import annotations

import base64
import contextlib
import io
import random
import struct
import time
import warnings
from collections.abc import Iterator

import imagecodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from afferent.config import ServeConfig
from afferent.errors import InvalidMedia, MediaTooLarge, UnsupportedMedia
from afferent.media.headers.image_sizes import read_sizes
from afferent.media.headers.probe import (
    Accepted,
    ForwardedHeader,
    ImageBound,
    ImageHeader,
    probe_accepted,
    probe_frames,
    probe_image,
)
from tests.callbacks import measured
from tests.collector import frozen
from tests.images import encoded, photo

pytestmark = pytest.mark.timeout(120)

LIMITS = ServeConfig()
FORMATS: tuple[tuple[str, dict[str, object]], ...] = (
    ("AVIF", {}),
    ("TIFF", {}),
    ("TIFF", {"compression": "tiff_lzw"}),
    ("TIFF", {"big_tiff": True}),
    ("BMP", {}),
    ("ICO", {}),
    ("ICO", {"bitmap_format": "bmp"}),
    ("JPEG2000", {}),
    ("JPEG2000", {"no_jp2": True}),
    ("PPM", {}),
    ("TGA", {}),
    ("TGA", {"compression": "tga_rle"}),
)
PILLOW = tuple(dict.fromkeys(name for name, _ in FORMATS))


def files() -> Iterator[tuple[str, bytes]]:
    source = photo(37, 29)
    for name, parameters in FORMATS:
        yield f"{name} {parameters}", encoded(source, name, **parameters)
    for mode in ("L", "1", "P", "RGBA"):
        yield f"BMP {mode}", encoded(source.convert(mode), "BMP")
        yield f"TIFF {mode}", encoded(source.convert(mode), "TIFF")
        yield f"TGA {mode}", encoded(source.convert(mode), "TGA")
    yield "PGM", encoded(source.convert("L"), "PPM")
    yield "PBM", encoded(source.convert("1"), "PPM")
    yield "plain", b"P3 # a comment\n 2\n# another\n2 255\n" + b"1 2 3 " * 4
    more = {"save_all": True, "append_images": [photo(50, 60)]}
    yield "TIFF of two", encoded(source, "TIFF", **more)
    yield "AVIF of two", encoded(source, "AVIF", save_all=True, append_images=[source])
    yield "avif by imagecodecs", imagecodecs.avif_encode(np.asarray(source))
    yield "jp2 by imagecodecs", imagecodecs.jpeg2k_encode(np.asarray(source))
    yield "bmp by imagecodecs", imagecodecs.bmp_encode(np.asarray(source))


@pytest.mark.parametrize(("name", "parameters"), FORMATS)
@settings(max_examples=8, deadline=None)
@given(width=st.integers(1, 120), height=st.integers(1, 120))
def test_sizes_are_those_that_pillow_wrote(
    name: str, parameters: dict[str, object], width: int, height: int
) -> None:
    image = Image.new("RGB", (width, height), "red")
    if name == "ICO":
        parameters = {**parameters, "sizes": [(width, height)]}
    with Image.open(io.BytesIO(data := encoded(image, name, **parameters))) as opened:
        assert set(read_sizes(data)) == {opened.size}


def test_largest_of_several_images_counts() -> None:
    icon = encoded(photo(200, 200), "ICO", sizes=[(16, 16), (128, 128)])
    pages = encoded(photo(9, 8), "TIFF", save_all=True, append_images=[photo(300, 200)])
    assert max(read_sizes(icon)) == (128, 128)
    assert max(read_sizes(pages)) == (300, 200)
    for data in (icon, pages):
        with pytest.raises(MediaTooLarge, match="--max-image-pixels"):
            probe_accepted(data, ServeConfig(max_image_pixels=16_000), Accepted.KNOWN)


def test_upside_down_bitmap_has_its_height() -> None:
    data = bytearray(encoded(photo(37, 29), "BMP"))
    struct.pack_into("<i", data, 22, -29)
    assert read_sizes(bytes(data)) == [(37, 29)]


def test_png_in_an_icon_counts_by_its_own_header() -> None:
    large = encoded(Image.new("RGB", (3000, 2000)), "PNG")
    data = struct.pack("<HHH4BHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(large), 22) + large
    assert max(read_sizes(data)) == (3000, 2000)


def test_codestream_counts_beside_the_file_header() -> None:
    data = bytearray(encoded(photo(37, 29), "JPEG2000"))
    at = data.index(b"\xff\x4f\xff\x51") + 8
    struct.pack_into(">II", data, at, 30_000, 30_000)
    assert max(read_sizes(bytes(data))) == (30_000, 30_000)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"%PDF-1.7 and so on, for some more bytes", id="pdf"),
        pytest.param(b"\x0a\x00\x02" + bytes(5) + b"\0\0\0\0\1\0\1\0\x18\0", id="tga or pcx"),
        pytest.param(b"\0\0\2\0\1\0\0\0" + b"\0\0\0\0\1\0\1\0\x18\0", id="tga or cur"),
        pytest.param(b"\x1c\x01\x01\0\0\0\1\x18" + b"\0\0\0\0\1\0\1\0\x18\0", id="tga or iptc"),
    ],
)
def test_unknown_and_ambiguous_files_are_refused(data: bytes) -> None:
    with pytest.raises(UnsupportedMedia):
        read_sizes(data)


def test_pnm_that_could_be_an_im_file_is_refused() -> None:
    with pytest.raises(InvalidMedia):
        read_sizes(b"P6 2 2 255 a:\nImage size (x*y): 30000*5000\n" + bytes(99))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"II*\0\x08\0\0\0" + b"\xff\xff" + bytes(999), id="many tags, cut"),
        pytest.param(b"II*\0\x08\0\0\0" + b"\xff\xff" + bytes(12 * 65_535 + 4), id="many tags"),
        pytest.param(b"BM" + bytes(12) + struct.pack("<Iii", 40, 0, 5) + bytes(30), id="no width"),
        pytest.param(b"BM" + bytes(12) + struct.pack("<I", 41) + bytes(60), id="no bitmap header"),
        pytest.param(b"P6 1_0 5 255\n", id="underscore"),
        pytest.param(b"P6 12345678901 5 255\n", id="long number"),
        pytest.param(b"P6\n" + b"#\n" * 4000 + b"2 2 255\n", id="many comments"),
        pytest.param(b"\xff\x4f\xff\x51" + b"\0" * 12, id="cut codestream"),
        pytest.param(b"\0\0\0\x0cjP  \r\n\x87\n", id="nothing in it"),
        pytest.param(b"\0\0\0\x18ftypavif" + bytes(12) + b"\0\0\0\x08free" * 5000, id="many boxes"),
    ],
)
def test_broken_headers_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidMedia):
        read_sizes(data)


def test_a_tiff_whose_pages_go_in_a_circle_ends() -> None:
    data = bytearray(encoded(photo(5, 6), "TIFF"))
    (at,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, at)
    struct.pack_into("<I", data, at + 2 + 12 * count, at)
    assert set(read_sizes(bytes(data))) == {(5, 6)}


def test_cut_files_are_whole_or_refused() -> None:
    for name, data in files():
        whole = read_sizes(data)
        for length in range(min(len(data), 700)):
            with contextlib.suppress(InvalidMedia):
                assert set(read_sizes(data[:length])) <= set(whole), (name, length)


def test_damaged_files_are_never_larger_for_pillow_than_their_header_said() -> None:
    """Pillow's size is the relevant limit, because vLLM decodes with Pillow."""
    rng = random.Random(5)
    good, num_opened, longest_s = list(files()), 0, 0.0
    with frozen(), measured() as cost:
        for number in range(4000):
            data = bytearray(good[number % len(good)][1])
            end = min(len(data), rng.choice((40, 200, len(data))))
            for _ in range(rng.choice((1, 1, 2, 5))):
                data[rng.randrange(end)] ^= 1 << rng.randrange(8)
            started_s = time.thread_time()
            try:
                sizes = read_sizes(bytes(data))
            except InvalidMedia:
                continue
            finally:
                longest_s = max(longest_s, time.thread_time() - started_s)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    with Image.open(io.BytesIO(bytes(data)), formats=PILLOW) as opened:
                        width, height = opened.size
                except Exception:  # noqa: S112 - an image that Pillow can't open is not decoded
                    continue
            num_opened += 1
            assert width * height <= max(w * h for w, h in sizes), good[number % len(good)][0]
    assert num_opened > 1000
    assert longest_s < 0.1 * cost.slowness


@settings(max_examples=300, deadline=None)
@given(
    head=st.sampled_from([data[:24] for _, data in files()]),
    rest=st.binary(max_size=400),
)
def test_arbitrary_bytes_give_sizes_or_a_typed_error(head: bytes, rest: bytes) -> None:
    with contextlib.suppress(InvalidMedia):
        assert min(map(min, read_sizes(head + rest))) >= 1


# Accepted files


@pytest.mark.parametrize(("name", "parameters"), FORMATS)
def test_a_worker_reads_the_exact_header(name: str, parameters: dict[str, object]) -> None:
    data = encoded(photo(37, 29), name, **parameters)
    with Image.open(io.BytesIO(data)) as opened:
        width, height = opened.size
    for accepted in Accepted:
        assert probe_accepted(data, LIMITS, accepted) == ImageBound(width * height)


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (5, 1)])
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "AVIF"])
def test_a_side_of_one_pixel_is_forwarded(size: tuple[int, int], format: str) -> None:
    data = encoded(Image.new("RGB", size), format)
    assert probe_accepted(data, LIMITS, Accepted.KNOWN) == ForwardedHeader(size[0] * size[1])
    with pytest.raises(InvalidMedia, match="at least 2"):
        probe_image(data, LIMITS)


def test_known_formats_are_decoded_here() -> None:
    data = encoded(photo(37, 29), "PNG")
    for accepted in Accepted:
        assert probe_accepted(data, LIMITS, accepted) == ImageHeader(37, 29)


def test_unknown_files_are_forwarded_only_where_all_are() -> None:
    data = encoded(photo(37, 29), "PCX")
    with pytest.raises(UnsupportedMedia, match=r"TGA image; .* --media-formats all"):
        probe_accepted(data, LIMITS, Accepted.KNOWN)
    assert probe_accepted(data, LIMITS, Accepted.ALL) == ForwardedHeader()


@pytest.mark.parametrize("accepted", [Accepted.KNOWN, Accepted.ALL])
def test_limits_hold_for_forwarded_files(accepted: Accepted) -> None:
    data = encoded(Image.new("RGB", (300, 200)), "BMP")
    for name, most in (
        ("max_image_nbytes", len(data) - 1),
        ("max_image_pixels", 59_999),
        ("max_image_side", 299),
        ("max_image_aspect", 1),
    ):
        with pytest.raises(MediaTooLarge, match="--" + name.replace("_", "-")):
            probe_accepted(data, ServeConfig(**{name: most}), accepted)


# Frames


def frames(*images: bytes) -> bytes:
    return b",".join(map(base64.b64encode, images))


def test_each_frame_of_a_video_is_read() -> None:
    text = frames(encoded(photo(37, 29), "JPEG"), encoded(photo(20, 10), "JPEG"))
    assert list(probe_frames(text, LIMITS)) == [(37, 29), (20, 10)]


def test_frames_are_limited_each_and_together() -> None:
    text = frames(*[encoded(photo(37, 29), "JPEG")] * 3)
    for name, most in (
        ("max_sampled_frames", 2),
        ("max_image_nbytes", len(text) // 6),
        ("max_frame_pixels", 37 * 29 - 1),
        ("max_video_decoded_nbytes", 37 * 29 * 9 - 1),
    ):
        with pytest.raises(MediaTooLarge, match="--" + name.replace("_", "-")):
            list(probe_frames(text, ServeConfig(**{name: most})))


@pytest.mark.parametrize("text", [b"", b",", b"abc", b"?,?", frames(b"no image at all, is it?")])
def test_frames_that_are_none_are_refused(text: bytes) -> None:
    with pytest.raises(InvalidMedia):
        list(probe_frames(text, LIMITS))
