"""Images of every format are Pillow's pixels, upright wherever Pillow finds an orientation."""

from __future__ import annotations

import contextlib
import io
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageOps

from afferent.config import Limits
from afferent.errors import InvalidMedia, MediaTooLarge, UnsupportedMedia
from afferent.media.decode import pillow
from afferent.media.decode.image import decode_image, read_image_header
from afferent.media.decoded import Pixels
from afferent.media.headers.image_format import ImageFormat, format_of, is_container
from afferent.media.headers.image_sizes import is_deep_grey
from afferent.media.headers.probe import ImageBound, ImageHeader, probe_image
from tests.images import chunk, encoded, heic, in_mode, oriented, photo, riff_chunk, segment, webp
from tests.media.golden_features import IMAGE_SUFFIXES, MEDIA

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::UserWarning")]

LIMITS = Limits()
EXIF = oriented(6)


def decoded(data: bytes, limits: Limits = LIMITS) -> Pixels:
    view = memoryview(data)
    return decode_image(view, read_image_header(view, limits), limits).pixels


def by_vllm(data: bytes) -> Pixels:
    """Decode a file as vLLM does: by Pillow, and over white."""
    is_heic = format_of(data) is ImageFormat.HEIC
    opened = pillow_heif.HeifImageFile if is_heic else Image.open
    with opened(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
    if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
        layer = upright.convert("RGBA")
        upright = Image.new("RGB", layer.size, "white")
        upright.paste(layer, mask=layer.getchannel("A"))
    return np.asarray(upright.convert("RGB"))


MOVING = {"save_all": True, "append_images": [photo(37, 29, seed=1)]}
XMP = b'<x:xmpmeta tiff:Orientation="8"/>'
KINDS: dict[str, tuple[tuple[str, str, dict[str, Any]], ...]] = {
    "JPEG": (("RGB", "JPEG", {}), ("L", "JPEG", {"exif": EXIF}), ("RGB", "JPEG", {"xmp": XMP})),
    "JPEG, progressive": (("RGB", "JPEG", {"progressive": True}), ("CMYK", "JPEG", {})),
    "PNG": tuple((mode, "PNG", {"exif": EXIF}) for mode in ("RGB", "RGBA", "L", "LA", "P", "1")),
    "PNG, animated": (("RGB", "PNG", MOVING), ("RGBA", "PNG", MOVING)),
    "WebP": (("RGB", "WEBP", {"exif": EXIF}), ("RGBA", "WEBP", {"lossless": True, "xmp": XMP})),
    "WebP, animated": (("RGB", "WEBP", MOVING), ("RGBA", "WEBP", {**MOVING, "exif": EXIF})),
    "GIF": (
        ("P", "GIF", {}),
        ("L", "GIF", {}),
        ("P", "GIF", {"transparency": 3}),
        ("P", "GIF", MOVING),
    ),
    "AVIF": (
        *(("RGB", "AVIF", {}), ("RGBA", "AVIF", {}), ("L", "AVIF", {"exif": EXIF})),
        *(("RGB", "AVIF", {"subsampling": "4:4:4", "exif": oriented(3)}), ("RGB", "AVIF", MOVING)),
    ),
    "HEIC": (
        *(("RGB", "HEIC", {}), ("RGBA", "HEIC", {}), ("L", "HEIC", {})),
        *(("RGB", "HEIC", {"exif": EXIF}), ("RGB", "HEIC", {"tile_size": 16})),
    ),
    "TIFF": (
        *((mode, "TIFF", {"exif": EXIF}) for mode in ("RGB", "RGBA", "L", "P", "CMYK", "YCbCr")),
        *(("RGB", "TIFF", {"big_tiff": True}), ("RGB", "TIFF", MOVING)),
    ),
    "TIFF, compressed": (
        *(("1", "TIFF", {"compression": each}) for each in ("group3", "group4", "packbits")),
        *(("RGB", "TIFF", {"compression": each, "exif": EXIF}) for each in ("jpeg", "tiff_lzw")),
        *(("LA", "TIFF", {"compression": each}) for each in ("tiff_adobe_deflate", "zstd")),
    ),
    "BMP": tuple((mode, "BMP", {}) for mode in ("RGB", "RGBA", "L", "P", "1")),
    "ICO": (
        *(("RGBA", "ICO", {"sizes": [(16, 16), (37, 29)]}), ("L", "ICO", {"sizes": [(20, 20)]})),
        *(("RGBA", "ICO", {"bitmap_format": "bmp"}), ("RGB", "ICO", {"bitmap_format": "bmp"})),
    ),
    "JPEG 2000": (
        *((mode, "JPEG2000", {}) for mode in ("RGB", "RGBA", "L", "LA")),
        *(("RGB", "JPEG2000", {"no_jp2": True}), ("RGB", "JPEG2000", {"irreversible": True})),
    ),
    "PNM": tuple((mode, "PPM", {}) for mode in ("RGB", "L", "1")),
    "TGA": (
        *((mode, "TGA", {}) for mode in ("RGB", "RGBA", "L", "LA", "P", "1")),
        *((mode, "TGA", {"compression": "tga_rle"}) for mode in ("RGB", "RGBA", "P")),
    ),
}


def made(mode: str, format: str, options: dict[str, Any]) -> bytes:
    image = in_mode(photo(37, 29), mode)
    return heic(image, **options) if format == "HEIC" else encoded(image, format, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_decode_image_of_each_kind_equals_pillow(kind: str) -> None:
    for mode, format, options in KINDS[kind]:
        data = made(mode, format, options)
        message = f"{mode} {options}"
        np.testing.assert_array_equal(decoded(data), by_vllm(data), err_msg=message)
        assert not is_deep_grey(data), message


def test_kinds_are_fifteen_at_least_with_sixty_files() -> None:
    assert len(KINDS) >= 15
    assert sum(map(len, KINDS.values())) >= 60


def test_decode_image_of_the_corpus_equals_pillow() -> None:
    """The corpus has files that no present encoder may write again."""
    for path in sorted(MEDIA.iterdir()):
        if path.suffix in IMAGE_SUFFIXES and not is_deep_grey(data := path.read_bytes()):
            np.testing.assert_array_equal(decoded(data), by_vllm(data), err_msg=path.name)


@pytest.mark.parametrize("format", ["PNG", "TIFF", "JPEG2000", "PPM", "ICO"])
def test_grey_of_sixteen_bits_becomes_its_upper_byte(format: str) -> None:
    """Pillow's own conversion clips at 255; a server behind this one gets such a file as it is."""
    image = in_mode(photo(37, 29), "I;16")
    options = {"sizes": [(37, 29)]} if format == "ICO" else {}
    data = encoded(image, format, **options)
    assert is_deep_grey(data)
    upper = np.asarray(image).astype(np.uint16)[..., None] >> 8
    np.testing.assert_array_equal(decoded(data), np.repeat(upper, 3, axis=2))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_format_is_shown_upright(orientation: int) -> None:
    exif, xmp = oriented(orientation), XMP.replace(b"8", b"%d" % orientation)
    image = photo(37, 29)
    for data in (
        *(encoded(image, format, exif=exif) for format in ("TIFF", "AVIF", "PNG", "WEBP", "JPEG")),
        *(encoded(image, format, xmp=xmp) for format in ("JPEG", "WEBP", "AVIF")),
        encoded(image, "TIFF", compression="tiff_lzw", exif=exif),
        encoded(image, "TIFF", tiffinfo={700: xmp}),
        heic(image, exif=exif),
    ):
        header = read_image_header(data, LIMITS)
        assert (header.width, header.height) == ((37, 29) if orientation < 5 else (29, 37))
        np.testing.assert_array_equal(decoded(data), by_vllm(data))


def test_gif_whose_frame_exceeds_its_screen_equals_pillow() -> None:
    data = encoded(in_mode(photo(37, 29), "P"), "GIF", comment=b"hello")
    small = data[:6] + struct.pack("<HH", 20, 40) + data[10:]
    assert read_image_header(small, LIMITS) == ImageHeader(37, 40)
    np.testing.assert_array_equal(decoded(small), by_vllm(small))


# Metadata in any order, and broken


def drawn_exif(rng: random.Random) -> bytes:
    order, number = rng.choice("<>"), rng.choice((0, 1, 2, 3, 5))
    entries = b""
    for _ in range(number):
        tag = rng.choice((0x0112, 0x0112, 0x010F, 0x011A, 0x8769))
        kind, count = rng.choice((3, 3, 3, *range(14), 16, 99)), rng.choice((1, 1, 1, 2, 0, 100))
        value = rng.choice((rng.randrange(10), rng.randrange(200), 1 << 31))
        layout = "H2x" if kind in (3, 8) and value < 10 else "I"
        entries += struct.pack(f"{order}HHI", tag, kind, count) + struct.pack(order + layout, value)
    start = rng.choice((8, 8, 8, 8, 9, 500))
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", start, number)
    data = head + entries + bytes(rng.choice((0, 4, 44, 124)))
    if rng.random() < 0.15:
        data = data[: rng.randrange(len(data) + 1)]
    if rng.random() < 0.05:
        data = data[:2] + rng.choice((b"\0*", b"*\0", b"+\0", b"\0+")) + data[4:]
    return data


def drawn_xmp(rng: random.Random) -> bytes:
    forms = b'<x tiff:Orientation="%d"/>', b"<tiff:Orientation>%d</x>", b"<tiff:Orientation='%d'/>"
    return rng.choice(forms) % rng.randrange(10)


def drawn_jpeg(rng: random.Random, exifs: list[bytes], xmps: list[bytes]) -> bytes:
    whole = encoded(photo(24, 16), "JPEG")
    parts = [segment(0xE1, b"Exif\0\0" + each) for each in exifs]
    parts += [segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + each) for each in xmps]
    rng.shuffle(parts)
    at = rng.choice((2, whole.index(b"\xff\xdb"), whole.index(b"\xff\xda")))
    return whole[:at] + b"".join(parts) + whole[at:]


def drawn_png(rng: random.Random, exifs: list[bytes], xmps: list[bytes]) -> bytes:
    whole = encoded(photo(24, 16), "PNG")
    chunks = [chunk(b"eXIf", each) for each in exifs]
    for each in xmps:
        packed = zlib.compress(each)
        chunks.append(
            rng.choice(
                (
                    chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + each),
                    chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + packed),
                    chunk(b"zTXt", b"XML:com.adobe.xmp\0\0" + packed),
                    chunk(b"tEXt", b"Comment\0" + each),
                )
            )
        )
    if rng.random() < 0.3:
        raw = b"Exif\0\0" + drawn_exif(rng)
        text = b"\nexif\n%8d\n" % len(raw) + raw.hex().encode() + b"\n"
        chunks.append(
            rng.choice(
                (
                    chunk(b"tEXt", b"Raw profile type exif\0" + text),
                    chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(text)),
                    chunk(b"tEXt", b"exif\0" + raw),
                )
            )
        )
    rng.shuffle(chunks)
    cut = rng.randrange(len(chunks) + 1)
    before, behind = b"".join(chunks[:cut]), b"".join(chunks[cut:])
    return whole[:33] + before + whole[33:-12] + behind + whole[-12:]


def drawn_webp(rng: random.Random, exifs: list[bytes], xmps: list[bytes]) -> bytes:
    pixels = encoded(photo(24, 16), "WEBP", lossless=True)[12:]
    parts = [riff_chunk(b"EXIF", rng.choice((b"", b"Exif\0\0")) + each) for each in exifs]
    parts += [riff_chunk(b"XMP ", each) for each in xmps]
    rng.shuffle(parts)
    flags = rng.choice((0x0C, 0x0C, 0x08, 0x04, 0))
    extended = bytes((flags, 0, 0, 0, 23, 0, 0, 15, 0, 0))
    return webp([riff_chunk(b"VP8X", extended), pixels, *parts])


@pytest.mark.parametrize("draw", [drawn_jpeg, drawn_png, drawn_webp])
def test_orientation_in_any_metadata_is_that_of_pillow(
    draw: Callable[[random.Random, list[bytes], list[bytes]], bytes],
) -> None:
    rng, num_read, num_left_to_pillow = random.Random(11), 0, 0
    for number in range(500):
        exifs = [drawn_exif(rng) for _ in range(rng.choice((0, 1, 1, 1, 2)))]
        data = draw(rng, exifs, [drawn_xmp(rng) for _ in range(rng.choice((0, 0, 1, 2)))])
        try:
            expected = by_vllm(data)
        except Exception:  # noqa: S112 - Pillow can't write the metadata of the upright image
            continue
        num_read += 1
        num_left_to_pillow += isinstance(probe_image(data, LIMITS), ImageBound)
        np.testing.assert_array_equal(decoded(data), expected, err_msg=f"file {number}")
    assert num_read > 300
    assert 0 < num_left_to_pillow < num_read


# Limits


def test_size_is_checked_again_where_pillow_reads_another_one(monkeypatch: Any) -> None:
    """Only a decoder knows the size of a HEIC file for certain: its header repeats it."""
    data = heic(photo(64, 48))
    at = data.index(b"ispe") + 8
    small = data[:at] + struct.pack(">II", 4, 4) + data[at + 8 :]
    assert probe_image(small, LIMITS) == ImageBound(16)
    with contextlib.suppress(InvalidMedia):
        assert read_image_header(small, LIMITS) in (ImageHeader(64, 48), ImageHeader(4, 4))
    with pytest.raises(InvalidMedia):
        decode_image(memoryview(small), ImageHeader(4, 4), LIMITS)
    with pytest.raises(MediaTooLarge):
        pillow.read_header(data, Limits(max_image_pixels=1000))


def test_side_of_one_pixel_is_refused_in_every_format() -> None:
    for format in ("BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA"):
        data = encoded(Image.new("RGB", (1, 20)), format)
        with pytest.raises(InvalidMedia, match="at least 2"):
            read_image_header(data, LIMITS)


def test_heic_without_its_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(pillow._FILES, ImageFormat.HEIC)
    with pytest.raises(UnsupportedMedia, match="pillow-heif"):
        read_image_header(heic(photo(20, 20)), LIMITS)


@pytest.mark.parametrize(
    ("brands", "kind"),
    [
        (b"avif\0\0\0\0mif1miaf", ImageFormat.AVIF),
        (b"mif1\0\0\0\0mif1avif", ImageFormat.AVIF),
        (b"mif1\0\0\0\0mif1heic", ImageFormat.HEIC),
        (b"heic\0\0\0\0mif1avif", ImageFormat.HEIC),
        (b"msf1\0\0\0\0msf1avis", ImageFormat.AVIF),
    ],
)
def test_brands_tell_avif_from_heic(brands: bytes, kind: ImageFormat) -> None:
    data = struct.pack(">I", 8 + len(brands)) + b"ftyp" + brands + bytes(40)
    assert format_of(data) is kind
    assert not is_container(data)
    assert is_container(data.replace(brands[:4], b"isom", 1))
