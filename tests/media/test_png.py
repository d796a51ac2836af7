"""PNG: rows without their filters by the compiled part, and what of a file Pillow decides."""

from __future__ import annotations

import io
import itertools
import random
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image

from afferent.config import Limits
from afferent.errors import InvalidMedia
from afferent.media import native
from afferent.media.decode import pillow
from afferent.media.decode import png as png_format
from afferent.media.decode.image import decode_image, read_image_header
from afferent.media.decoded import Array, Pixels
from tests.images import chunk, encoded, in_mode, photo
from tests.media.variants import VARIANTS, assert_ends_well

NUM_CASES, NUM_BROKEN, NUM_STORM = 300, 400, 20_000
LIMITS = Limits()
MODES = {1: "L", 3: "RGB", 4: "RGBA"}
COLOURS = {1: 0, 3: 2, 4: 6}
BEHIND = 3

pytestmark = pytest.mark.skipif(native.compiled is None, reason="there is no compiled part")


def png_of(rows: bytes, width: int, height: int, channels: int, *, cuts: int = 1) -> bytes:
    """Return a file whose data inflate to ``rows``, in so many chunks."""
    header = struct.pack(">IIBBBBB", width, height, 8, COLOURS[channels], 0, 0, 0)
    data = zlib.compress(rows)
    at = [len(data) * cut // cuts for cut in range(cuts + 1)]
    parts = [chunk(b"IDAT", data[start:end]) for start, end in itertools.pairwise(at)]
    return b"".join((b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), *parts, chunk(b"IEND", b"")))


def rows_of(rng: np.random.Generator, width: int, height: int, channels: int) -> Array:
    """Draw rows with any filters: each sequence of bytes is one of an image."""
    rows = rng.integers(0, 256, (height, 1 + width * channels), np.uint8)
    if rng.random() < 0.3:  # small differences, as of drawings
        rows = (rows > 250).astype(np.uint8)
    rows[:, 0] = rng.integers(0, 5, height) if rng.random() < 0.7 else rng.integers(0, 5)
    return rows


def raw_by_pillow(data: bytes) -> Array:
    return np.asarray(Image.open(io.BytesIO(data)))


def unfiltered(rows: bytes, shape: tuple[int, int, int], variant: str) -> Array:
    out = np.full(shape, 77, np.uint8)
    native.compiled.unfilter(rows + b"\xff" * BEHIND, out, variant)
    return out


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_all_filters_become_pillows_pixels(
    variant: str, request: pytest.FixtureRequest
) -> None:
    rng = np.random.default_rng(5)
    num_cases = NUM_STORM if request.config.getoption("--storm") else NUM_CASES
    for index in range(num_cases):
        most = int(rng.choice([4, 9, 70]))
        width, height = (int(rng.integers(1, most)) for _ in range(2))
        channels = (1, 3, 4)[index % 3]
        rows = rows_of(rng, width, height, channels).tobytes()
        expected = raw_by_pillow(png_of(rows, width, height, channels))
        made = unfiltered(rows, (height, width, channels), variant)
        np.testing.assert_array_equal(
            made, expected.reshape(made.shape), err_msg=f"case {index}: {made.shape}"
        )


@pytest.mark.parametrize("filter", range(5))
@pytest.mark.parametrize("channels", MODES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_extreme_bytes_under_each_filter_become_pillows_pixels(
    variant: str, channels: int, filter: int
) -> None:
    """Neighbours of 0 and 255 are the farthest apart."""
    rng = np.random.default_rng(filter)
    rows = rng.choice(np.array([0, 1, 127, 128, 255], np.uint8), (64, 1 + 64 * channels))
    rows[:, 0] = filter
    rows[0, 0] = rng.integers(0, 5)
    expected = raw_by_pillow(png_of(rows.tobytes(), 64, 64, channels))
    made = unfiltered(rows.tobytes(), (64, 64, channels), variant)
    np.testing.assert_array_equal(made, expected.reshape(made.shape))


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_unknown_filter_is_refused_in_any_row(variant: str) -> None:
    for height in range(1, 10):
        for bad in range(height):
            rows = np.full((height, 7), 4, np.uint8)
            rows[bad, 0] = 5 + 250 * (bad % 2)
            with pytest.raises(ValueError, match="unknown filter"):
                unfiltered(rows.tobytes(), (height, 2, 3), variant)


def test_arrays_that_do_not_match_are_refused() -> None:
    out, rows = np.zeros((4, 5, 3), np.uint8), bytes(4 * 16 + BEHIND)
    for wrong in (rows[:-1], rows + b"\0", b""):
        with pytest.raises(ValueError, match="another size"):
            native.compiled.unfilter(wrong, out, native.variant)
    for other in (
        np.zeros((4, 10, 3), np.uint8)[:, ::2],
        np.zeros((3, 5, 4), np.uint8).T,
        np.zeros((4, 15), np.uint8),
        np.zeros((4, 5, 3), np.uint16),
    ):
        with pytest.raises(ValueError, match="one behind the other"):
            native.compiled.unfilter(rows, other, native.variant)
    for shape in ((0, 5, 3), (4, 0, 3)):
        with pytest.raises(ValueError, match="no pixels"):
            native.compiled.unfilter(bytes(shape[0] + BEHIND), np.zeros(shape, np.uint8), "avx2")
    with pytest.raises(ValueError, match="1, 3 or 4 channels"):
        native.compiled.unfilter(bytes(4 * 11 + BEHIND), np.zeros((4, 5, 2), np.uint8), "portable")
    with pytest.raises(ValueError, match="no such variant"):
        native.compiled.unfilter(rows, out, "sse9")
    with pytest.raises((ValueError, BufferError)):
        native.compiled.unfilter(rows, np.frombuffer(bytes(60), np.uint8).reshape(4, 5, 3), "avx2")


GUARDED = """
source, target = before_a_guarded_page(), before_a_guarded_page()
rng = np.random.default_rng(3)
for channels in (1, 3, 4):
    for width in range(1, 40):
        for height in range(1, 10):
            rows = source[-(height * (1 + width * channels) + 3) :]
            rows[:] = rng.integers(0, 256, rows.size)
            rows[: rows.size - 3 : 1 + width * channels] = rng.integers(0, 5, height)
            out = target[-height * width * channels :].reshape(height, width, channels)
            native.compiled.unfilter(rows, out, sys.argv[1])
"""


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_beyond_the_arrays_is_read_or_written(variant: str) -> None:
    assert_ends_well(GUARDED, variant)


def outcome(data: bytes, *, only_pillow: bool) -> Pixels | str:
    """Return the pixels of a file, or the error that refuses it."""
    with pytest.MonkeyPatch.context() as patch:
        if only_pillow:
            patch.setattr(native, "compiled", None)
        try:
            header = read_image_header(data, LIMITS)
            return decode_image(memoryview(data), header, LIMITS).pixels
        except InvalidMedia as error:
            return str(error)


def assert_pillow_agrees(data: bytes, what: object) -> None:
    made, expected = (outcome(data, only_pillow=each) for each in (False, True))
    assert isinstance(made, str) == isinstance(expected, str), (what, made, expected)
    np.testing.assert_array_equal(made, expected, err_msg=str(what))


@pytest.mark.timeout(1200)
def test_broken_files_end_as_pillow_lets_them(request: pytest.FixtureRequest) -> None:
    """Bytes of valid files are changed, cut out or doubled."""
    rng = random.Random(7)
    files = [
        encoded(in_mode(photo(23, 17), mode), "PNG", compress_level=level)
        for mode in MODES.values()
        for level in (0, 6)
    ]
    num_files = NUM_STORM if request.config.getoption("--storm") else NUM_BROKEN
    for index in range(num_files):
        data = bytearray(rng.choice(files))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(8, len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    data[at] ^= 1 << rng.randrange(8)
                case 2:
                    del data[at : at + rng.randint(1, 9)]
                case _:
                    data[at:at] = data[at : at + rng.randint(1, 9)]
        assert_pillow_agrees(bytes(data), index)


def chunks_of(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return the kind and the data of each chunk."""
    found, at = [], 8
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        found.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += length + 12
    return found


def file_of(chunks: list[tuple[bytes, bytes]]) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in chunks)


KINDS = (
    *(b"IHDR", b"PLTE", b"IDAT", b"IEND", b"gAMA", b"cHRM", b"sRGB", b"pHYs", b"tIME", b"sBIT"),
    *(b"bKGD", b"tRNS", b"iCCP", b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"acTL", b"fcTL", b"fdAT"),
    *(b"ABCD", b"abcd", b"a!\0\xff", b"hIST", b"sPLT"),
)


@pytest.mark.timeout(1200)
def test_chunks_in_any_order_end_as_pillow_lets_them(request: pytest.FixtureRequest) -> None:
    """All sums are right: chunks are doubled, added, moved, changed and left out."""
    rng = random.Random(8)
    files = [
        png_of(rows_of(np.random.default_rng(channels), 9, 7, channels).tobytes(), 9, 7, channels)
        for channels in MODES
    ]
    num_files = NUM_STORM if request.config.getoption("--storm") else NUM_BROKEN
    for index in range(num_files):
        chunks = chunks_of(rng.choice(files))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(chunks))
            kind, data = chunks[at]
            match rng.randrange(6):
                case 0:
                    chunks.insert(at, (kind, data))
                case 1:
                    chunks.insert(at, chunks.pop(rng.randrange(len(chunks))))
                case 2 if len(chunks) > 2:
                    del chunks[at]
                case 3 if kind == b"IHDR":
                    width, height, *rest = struct.unpack(">IIBBBBB", data[:13].ljust(13, b"\0"))
                    rest[rng.randrange(5)] = rng.choice((0, 1, 2, 3, 4, 6, 8, 16))
                    changed = struct.pack(">IIBBBBB", width, height, *rest)
                    chunks.insert(at + rng.randrange(2), (kind, changed))
                case _:
                    added = rng.randbytes(rng.choice((0, 1, 3, 4, 6, 7, 9, 13, 32)))
                    chunks.insert(at, (rng.choice(KINDS), added))
        assert_pillow_agrees(file_of(chunks), (index, [kind for kind, _ in chunks]))


def test_chunks_without_an_effect_need_no_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(np.random.default_rng(4), 9, 7, 3).tobytes()
    header, *rest = chunks_of(png_of(rows, 9, 7, 3))
    harmless = [
        *((b"gAMA", bytes(4)), (b"cHRM", bytes(32)), (b"sRGB", b"\0"), (b"pHYs", bytes(9))),
        *((b"tIME", bytes(7)), (b"sBIT", b"\x08" * 3), (b"bKGD", bytes(6)), (b"tEXt", b"a\0b")),
    ]
    data = file_of([header, *harmless, *rest])
    expected = raw_by_pillow(data)
    monkeypatch.setattr(pillow, "decode_into", None)
    np.testing.assert_array_equal(outcome(data, only_pillow=False), expected)


def test_memory_does_not_grow_with_the_number_of_chunks() -> None:
    rows = rows_of(np.random.default_rng(5), 8, 8, 3).tobytes()
    header, data, end = chunks_of(png_of(rows, 8, 8, 3))
    file = memoryview(file_of([header, *[(b"IDAT", b"")] * 100_000, data, end]))
    tracemalloc.start()
    try:
        assert png_format.decode(file, 8, 8) is not None
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 100_000


@pytest.mark.parametrize("cuts", [2, 3, 40])
def test_data_in_several_chunks_need_no_pillow(cuts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(np.random.default_rng(1), 30, 20, 3).tobytes()
    data = png_of(rows, 30, 20, 3, cuts=cuts)
    expected = raw_by_pillow(data)
    monkeypatch.setattr(pillow, "decode_into", None)
    np.testing.assert_array_equal(outcome(data, only_pillow=False), expected)


def test_unusual_files_end_as_pillow_lets_them() -> None:
    rows = rows_of(np.random.default_rng(2), 9, 9, 3).tobytes()
    plain = png_of(rows, 9, 9, 3)
    begin, (data, end) = plain[:33], (plain[33:-12], plain[-12:])
    inflated = zlib.compress(rows)
    wrong_crc = bytes(4)
    cases = {
        "no end": begin + data,
        "a wrong CRC of the header": begin[:-4] + wrong_crc + data + end,
        "a wrong CRC of the data": begin + data[:-4] + wrong_crc + end,
        "a wrong CRC of a chunk before": begin
        + chunk(b"gAMA", b"\0\0\1\0")[:-4]
        + wrong_crc
        + data
        + end,
        "a wrong sum of the data": begin + chunk(b"IDAT", inflated[:-4] + wrong_crc) + end,
        "no sum of the data": begin + chunk(b"IDAT", inflated[:-4]) + end,
        "data behind the data": begin + chunk(b"IDAT", inflated + b"more") + end,
        "an empty chunk of data": begin + chunk(b"IDAT", b"") + data + end,
        "a chunk between data": begin
        + chunk(b"IDAT", inflated[:20])
        + chunk(b"tEXt", b"a\0b")
        + chunk(b"IDAT", inflated[20:])
        + end,
        "a palette": begin + chunk(b"PLTE", b"abcdef") + data + end,
        "a transparent colour": begin + chunk(b"tRNS", b"\0\1\0\2\0\3") + data + end,
        "an unknown necessary chunk": begin + chunk(b"ABCD", b"x") + data + end,
        "a second header": begin + begin[8:] + data + end,
        "too few rows": begin + chunk(b"IDAT", zlib.compress(rows[:-28])) + end,
        "a row too many": begin + chunk(b"IDAT", zlib.compress(rows + rows[:28])) + end,
        "another method": begin[:26] + b"\1" + begin[27:] + data + end,
        "no data": begin + end,
    }
    for what, file in cases.items():
        assert_pillow_agrees(file, what)


def test_wrong_data_are_left_to_pillow() -> None:
    """Files that the compiled part refuses get no pixels of the fast decoder."""
    rows = rows_of(np.random.default_rng(3), 9, 9, 3)
    rows[4, 0] = 9
    assert png_format.decode(memoryview(png_of(rows.tobytes(), 9, 9, 3)), 9, 9) is None
    assert png_format.decode(memoryview(png_of(bytes(28 * 9), 9, 9, 3)), 9, 8) is None
