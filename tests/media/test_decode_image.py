from __future__ import annotations

import io
import itertools
import mmap
import struct
import subprocess
import sys

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps

from afferent.config import Limits
from afferent.errors import InvalidMedia, MediaTooLarge, UnsupportedMedia
from afferent.media import native
from afferent.media.decode import image as image_module
from afferent.media.decode import jpeg, pillow
from afferent.media.decode import png as png_format
from afferent.media.decode.image import decode_image, read_image_header
from afferent.media.decoded import Pixels
from afferent.media.headers.image_format import ImageFormat
from afferent.media.headers.probe import ImageHeader
from tests.hostile_images import bombs, damaged, hostile_images
from tests.images import chunk, encoded, in_mode, oriented, photo, png, segment

LIMITS = Limits()
WHITE = (255, 255, 255, 255)
SIZES = ((37, 29), (64, 48), (2, 300))
JPEG_OPTIONS = ({}, {"subsampling": 0}, {"subsampling": 1}, {"subsampling": 2, "quality": 97})


def decoded(data: bytes, limits: Limits = LIMITS) -> Pixels:
    pixels = decode_image(memoryview(data), read_image_header(data, limits), limits).pixels
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    return pixels


def by_pillow(data: bytes) -> Pixels:
    """Decode a file with Pillow alone, as the reference."""
    with Image.open(io.BytesIO(data)) as opened:
        opened.load()
        image = ImageOps.exif_transpose(opened)
    if image.mode.startswith("I;16"):
        return np.repeat(np.asarray(image)[..., None] // 256, 3, axis=2).astype(np.uint8)
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image.convert("RGBA"))
    return np.asarray(image.convert("RGB"))


def files_of_all_modes(size: tuple[int, int], exif: bytes) -> dict[str, bytes]:
    source = photo(*size)
    files = {}
    for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"):
        files[f"png {mode}"] = encoded(in_mode(source, mode), "PNG", exif=exif)
    for mode in ("RGB", "L", "CMYK"):
        for number, options in enumerate(JPEG_OPTIONS):
            image = in_mode(source, mode)
            files[f"jpeg {mode} {number}"] = encoded(image, "JPEG", exif=exif, **options)
        files[f"jpeg {mode} progressive"] = encoded(image, "JPEG", exif=exif, progressive=True)
    files["jpeg in RGB"] = encoded(source, "JPEG", exif=exif, keep_rgb=True)
    for mode, lossless in itertools.product(("RGB", "RGBA"), (False, True)):
        image = in_mode(source, mode)
        files[f"webp {mode} {lossless}"] = encoded(image, "WEBP", lossless=lossless, exif=exif)
    return files


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", SIZES)
def test_as_pillow_sees_it(size: tuple[int, int], orientation: int) -> None:
    """All modes of all formats equal Pillow's pixels exactly, in every orientation."""
    exif = oriented(orientation, big_endian=orientation % 2 == 1)
    for name, data in files_of_all_modes(size, exif).items():
        np.testing.assert_array_equal(decoded(data), by_pillow(data), err_msg=name)


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("lossless", [False, True])
def test_webp_without_exif(mode: str, lossless: bool) -> None:
    data = encoded(in_mode(photo(61, 40), mode), "WEBP", lossless=lossless)
    np.testing.assert_array_equal(decoded(data), by_pillow(data))


@pytest.mark.parametrize("transform", [0, 1, 2])
def test_colours_of_adobe(transform: int) -> None:
    """Adobe's segment tells CMYK from YCCK, and RGB from YCbCr."""
    for mode in ("CMYK", "RGB"):
        data = encoded(in_mode(photo(40, 30), mode), "JPEG")
        adobe = segment(0xEE, b"Adobe\0\x64\0\0\0\0" + bytes((transform,)))
        if (at := data.find(b"Adobe")) >= 0:
            data = data[: at + 11] + bytes((transform,)) + data[at + 12 :]
        else:
            data = data[:2] + adobe + data[2:]
        np.testing.assert_array_equal(decoded(data), by_pillow(data), err_msg=mode)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(("colours", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_png_of_all_kinds(
    rng: np.random.Generator, bits: int, interlaced: bool, colours: int, channels: int
) -> None:
    for height, width in ((2, 3), (9, 8), (30, 41)):
        values = rng.integers(0, 1 << bits, (height, width, channels)).astype(f"u{bits // 8}")
        data = png(values, colours=colours, interlaced=interlaced)
        np.testing.assert_array_equal(decoded(data), by_pillow(data))


@pytest.mark.parametrize("bits", [8, 16])
def test_png_with_a_transparent_colour(bits: int) -> None:
    """The colour of the upper left pixel is transparent, and so white, wherever it occurs."""
    shift = bits - 8
    grey = (np.arange(12).reshape(3, 4, 1) % 6 * 20 << shift).astype(f"u{bits // 8}")
    for colours, pixels in ((0, grey), (2, np.repeat(grey, 3, axis=2))):
        clear = chunk(b"tRNS", struct.pack(">H", 0) * pixels.shape[2])
        seen = decoded(png(pixels, colours=colours, extra=[clear]))
        plain = decoded(png(pixels, colours=colours))
        np.testing.assert_array_equal(seen, np.where(grey == 0, 255, plain))


def test_palettes_with_transparency() -> None:
    palette = in_mode(photo(40, 30), "P")
    for transparency in (3, bytes(range(0, 256, 8))):
        data = encoded(palette, "PNG", transparency=transparency)
        np.testing.assert_array_equal(decoded(data), by_pillow(data))
    assert (decoded(data) != decoded(encoded(palette, "PNG"))).any()


def test_sixteen_bits_are_scaled() -> None:
    """Pillow's own conversion clips the values at 255."""
    values = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256, 1)
    seen = decoded(png(values, colours=0))
    np.testing.assert_array_equal(seen, np.repeat(values >> 8, 3, axis=2))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_first_frame_of_an_animation(format: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert (decoded(data) == (255, 0, 0)).all()


@pytest.mark.parametrize("transparency", [None, 3])
def test_gif(transparency: int | None) -> None:
    options = {} if transparency is None else {"transparency": transparency}
    for mode in ("P", "L", "1"):
        data = encoded(in_mode(photo(37, 29), mode), "GIF", comment=b"hello", **options)
        np.testing.assert_array_equal(decoded(data), by_pillow(data), err_msg=mode)


COMMON = {
    "jpeg": encoded(photo(37, 29), "JPEG", exif=oriented(6)),
    "jpeg, grey": encoded(in_mode(photo(37, 29), "L"), "JPEG"),
    "jpeg, progressive": encoded(photo(37, 29), "JPEG", progressive=True, icc_profile=b"x" * 99),
    "png": encoded(photo(37, 29), "PNG", exif=oriented(6), icc_profile=b"x" * 99),
    "png, transparent": encoded(in_mode(photo(37, 29), "RGBA"), "PNG"),
    "png, grey": encoded(in_mode(photo(37, 29), "L"), "PNG"),
    "webp": encoded(photo(37, 29), "WEBP"),
    "webp, transparent": encoded(in_mode(photo(37, 29), "RGBA"), "WEBP", exif=oriented(6)),
    "webp, lossless": encoded(in_mode(photo(37, 29), "RGBA"), "WEBP", lossless=True),
}


@pytest.mark.parametrize("name", COMMON)
def test_common_files_do_without_pillow(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("png") and native.compiled is None:
        pytest.skip("without the compiled part, Pillow decodes PNG")

    def refuse(*_: object) -> None:
        raise AssertionError("Pillow decoded it")

    expected = by_pillow(COMMON[name])
    monkeypatch.setattr(pillow, "decode_into", refuse)
    np.testing.assert_array_equal(decoded(COMMON[name]), expected)


@pytest.mark.parametrize("name", COMMON)
def test_read_only_memory(name: str) -> None:
    """Decoders read the file in place: they neither write to it nor read beyond its end."""
    data = COMMON[name]
    with mmap.mmap(-1, mmap.PAGESIZE * (1 + len(data) // mmap.PAGESIZE)) as shared:
        start = len(shared) - len(data)
        shared[start:] = data
        with memoryview(shared) as whole, whole[start:].toreadonly() as view:
            pixels = decode_image(view, read_image_header(data, LIMITS), LIMITS).pixels
        np.testing.assert_array_equal(pixels, by_pillow(data))
        assert shared[start:] == data


def test_files_that_are_not_what_was_planned() -> None:
    data = COMMON["jpeg"]
    header = read_image_header(data, LIMITS)
    assert header == ImageHeader(29, 37, 6)
    for other in (ImageHeader(37, 29, 6), ImageHeader(29, 37, 5), ImageHeader(29, 36, 6)):
        with pytest.raises(InvalidMedia, match="what its header says"):
            decode_image(memoryview(data), other, LIMITS)
    with pytest.raises(MediaTooLarge):
        decode_image(memoryview(data), header, Limits(max_image_pixels=1000))
    with pytest.raises(UnsupportedMedia):
        decode_image(memoryview(b"8BPS" + bytes(100)), header, LIMITS)
    with pytest.raises(InvalidMedia):
        decode_image(memoryview(b"BM" + bytes(100)), header, LIMITS)


@pytest.mark.parametrize("num_scans", [100, 101])
def test_number_of_scans(num_scans: int) -> None:
    data = encoded(photo(37, 29), "JPEG", progressive=True)
    data = data[:-2] + segment(0xDA, bytes((1, 1, 0, 1, 63, 0))) * (
        num_scans - data.count(b"\xff\xda")
    )
    if num_scans == 100:
        np.testing.assert_array_equal(decoded(data + b"\xff\xd9"), by_pillow(data + b"\xff\xd9"))
    else:
        with pytest.raises(InvalidMedia, match="scans"):
            decoded(data + b"\xff\xd9")


def test_damaged_files_are_judged_by_pillow() -> None:
    """If a damaged file decodes, Pillow decodes it to the same image, without its metadata."""
    lean = {
        ImageFormat.JPEG: jpeg.without_metadata,
        ImageFormat.PNG: png_format.without_metadata,
    }
    num_images = 0
    for name, data in itertools.islice(damaged(seed=3), 1200):
        try:
            header = read_image_header(data, LIMITS)
            seen = decode_image(memoryview(data), header, LIMITS).pixels
        except InvalidMedia:
            continue
        if header.orientation > 1:
            continue
        num_images += 1
        kind = ImageFormat[name.split()[0].upper()]
        expected = np.empty((header.height, header.width, 3), np.uint8)
        judged = lean[kind](memoryview(data)) if kind in lean else data
        pillow.decode_into(judged, kind, expected)
        np.testing.assert_array_equal(seen, expected, err_msg=name)
    assert num_images > 100


HOSTILE_LIMITS = Limits(max_image_pixels=4_000_000)


def test_hostile_images(caplog: pytest.LogCaptureFixture) -> None:
    """A hostile file becomes an image of the planned size, or a typed error, without any log."""
    num_images = num_refused = 0
    for name, data in hostile_images(seed=1, count=3500):
        try:
            header = read_image_header(data, HOSTILE_LIMITS)
            image = decode_image(memoryview(data), header, HOSTILE_LIMITS)
        except InvalidMedia:
            num_refused += 1
            continue
        num_images += 1
        assert image.pixels.shape == (header.height, header.width, 3), name
    assert num_images > 300
    assert num_refused > 2000
    assert not [each for each in caplog.records if not each.name.startswith("PIL.")]


MEASURE = """
import sys
from afferent.config import Limits
from afferent.errors import InvalidMedia
from afferent.media.decode.image import decode_image, read_image_header

def resident(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

limits = Limits(max_image_pixels=4_000_000)
files = sys.stdin.buffer
small = {small}
decode_image(memoryview(small), read_image_header(small, limits), limits)
before = resident("VmRSS")
longest = 0
while (size := int.from_bytes(files.read(4), "little")):
    data = files.read(size)
    longest = max(longest, size)
    try:
        decode_image(memoryview(data), read_image_header(data, limits), limits)
    except InvalidMedia:
        pass
print(resident("VmHWM") - before - longest)
"""


def peak_nbytes(*files: bytes) -> int:
    """Return the growth of a process that decodes the files, without the files themselves."""
    given = b"".join(len(data).to_bytes(4, "little") + data for data in files) + bytes(4)
    code = MEASURE.replace("{small}", repr(encoded(photo(16, 16), "JPEG")))
    done = subprocess.run(
        [sys.executable, "-c", code], input=given, capture_output=True, check=True
    )
    assert b"Traceback" not in done.stderr
    return int(done.stdout)


def test_a_sampling_that_the_fast_decoder_does_not_know() -> None:
    """The sampling 4:4:1 has the same bytes as 4:1:1, which the fast decoder supports."""
    data = bytearray(simplejpeg.encode_jpeg(np.asarray(photo(64, 64)), colorsubsampling="411"))
    frame = data.index(b"\xff\xc0")
    assert data[frame + 11] == 0x41
    data[frame + 11] = 0x14
    with pytest.raises(KeyError):
        simplejpeg.decode_jpeg_header(bytes(data))
    np.testing.assert_array_equal(decoded(bytes(data)), by_pillow(bytes(data)))


@pytest.mark.parametrize("error", [KeyError("6"), TypeError("no"), RuntimeError("no")])
def test_whatever_a_fast_decoder_raises_pillow_decides(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    data = encoded(photo(30, 20), "PNG")
    monkeypatch.setattr(png_format, "deflate_decode", fail)
    monkeypatch.setitem(image_module._FAST, ImageFormat.JPEG, fail)
    np.testing.assert_array_equal(decoded(data), by_pillow(data))
    data = encoded(photo(30, 20), "JPEG")
    np.testing.assert_array_equal(decoded(data), by_pillow(data))


def test_whatever_pillow_raises_the_image_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(pillow, "copy_rgb", fail)
    with pytest.raises(InvalidMedia, match="truncated or corrupt"):
        decoded(encoded(photo(30, 20), "GIF"))


def test_scans_cost_by_the_pixel() -> None:
    """The limit on the scans of a JPEG depends on its number of pixels."""
    small = encoded(photo(40, 30), "JPEG", progressive=True)
    scan = small[small.rindex(b"\xff\xda") : small.rindex(b"\xff\xd9")]
    many = small[:-2] + scan * 60 + b"\xff\xd9"
    jpeg._check_scans(memoryview(many), 40 * 30)
    jpeg._check_scans(memoryview(small), 64_000_000)
    with pytest.raises(InvalidMedia, match="too many scans"):
        jpeg._check_scans(memoryview(many), 64_000_000)


def test_bombs_stay_small() -> None:
    """Memory is needed only for the pixels of an allowed size."""
    files = [data for _, data in bombs()]
    assert len(files) > 50
    assert peak_nbytes(*files) < 16 * 4_000_000 + (16 << 20)


PEAKS = {
    "jpeg": ("RGB", "JPEG", {}, 4),
    "jpeg, turned": ("RGB", "JPEG", {"exif": oriented(6)}, 7),
    "jpeg, progressive": ("RGB", "JPEG", {"progressive": True, "subsampling": 0}, 10),
    "jpeg, CMYK": ("CMYK", "JPEG", {"progressive": True, "subsampling": 0}, 14),
    "png": ("RGB", "PNG", {"compress_level": 1}, 7 if native.compiled else 9),
    "png, RGBA": ("RGBA", "PNG", {"compress_level": 1}, 11),
    "png, 16 bits": ("I;16", "PNG", {"compress_level": 1}, 9),
    "webp, RGBA": ("RGBA", "WEBP", {"method": 0}, 12),
    "webp, animated": ("RGB", "WEBP", {"method": 0, "save_all": True, "minimize_size": False}, 21),
    "gif": ("P", "GIF", {}, 8),
    "avif, RGBA": ("RGBA", "AVIF", {"speed": 10}, 18),
    "jpeg 2000, RGBA": ("RGBA", "JPEG2000", {}, 30),
    "tiff, turned": ("RGB", "TIFF", {"exif": oriented(6)}, 14),
}
"""A mode, a format, its options, and the maximal number of bytes for each pixel."""


@pytest.mark.parametrize("name", PEAKS)
def test_memory_for_a_pixel(name: str) -> None:
    mode, format, options, max_nbytes = PEAKS[name]
    image = in_mode(photo(1600, 1200), mode)
    if "save_all" in options:
        options = {**options, "append_images": [photo(1600, 1200, seed=1)]}
    data = encoded(image, format, **options)
    file_nbytes = len(data) if format == "PNG" else 0  # its chunks are joined
    assert peak_nbytes(data) < max_nbytes * 1600 * 1200 + file_nbytes
