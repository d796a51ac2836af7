"""Sizes of images in formats whose exact header only Pillow reads, in a confined worker.

Only sizes are read, in bounded time; nothing is decoded. A file with several images is as large as
the largest of them. Sizes that a header repeats elsewhere (a codestream, a tile, an image within an
icon) count, too: a decoder may use any of them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Final

from afferent.errors import InvalidMedia
from afferent.media.headers.boxes import Box, boxes
from afferent.media.headers.image_format import Data, ImageFormat, format_of

Size = tuple[int, int]
"""Width and height in pixels."""

_MAX_BOXES: Final = 4096
_MAX_IMAGES: Final = 1024
_MAX_TAGS: Final = 16_384
"""Most tags of all images of a TIFF file together."""
_MAX_PNM_HEADER_NBYTES: Final = 4096


def read_sizes(data: Data) -> list[Size]:
    """Return the sizes of all images in a file, one at least, and none without pixels.

    Raises:
        UnsupportedMedia: The file has none of these formats.
        InvalidMedia: The header is broken, or longer than any honest one.
    """
    kind = format_of(data)
    try:
        sizes = list(islice(_READERS[kind](data), _MAX_IMAGES + 1))
    except (struct.error, IndexError, OverflowError) as error:
        raise InvalidMedia(f"the image's {kind} header is cut off") from error
    if not sizes or min(map(min, sizes)) < 1:
        raise InvalidMedia(f"the image's {kind} header names no size")
    if len(sizes) > _MAX_IMAGES:
        raise _too_long(kind)
    return sizes


def _too_long(kind: ImageFormat) -> InvalidMedia:
    return InvalidMedia(f"the image's {kind} header is longer than any honest one")


def _broken(kind: ImageFormat) -> InvalidMedia:
    return InvalidMedia(f"the image's {kind} header is broken")


class _Walk:
    """Boxes of one file; the number of visited boxes is limited."""

    def __init__(self, kind: ImageFormat, data: Data) -> None:
        self.data, self.file = data, (b"", 0, len(data))
        self._kind, self._num_left = kind, _MAX_BOXES

    def inside(self, outer: Box) -> Iterator[Box]:
        """Yield the boxes in another one.

        Raises:
            InvalidMedia: They are more than an honest file has.
        """
        for box in boxes(self.data, outer[1], outer[2]):
            self._num_left -= 1
            if self._num_left < 0:
                raise _too_long(self._kind)
            yield box

    def at(self, outer: Box, *path: bytes) -> Iterator[Box]:
        """Yield all boxes at the end of a path of kinds."""
        for box in self.inside(outer):
            if box[0] == path[0]:
                if len(path) == 1:
                    yield box
                else:
                    yield from self.at(box, *path[1:])


# AVIF and HEIC: the sizes of all items, and of all tracks


def _read_boxes(kind: ImageFormat, data: Data) -> Iterator[Size]:
    walk = _Walk(kind, data)
    for box in walk.inside(walk.file):
        name, start, end = box
        if name == b"meta":
            for inner in walk.at((name, start + 4, end), b"iprp", b"ipco", b"ispe"):
                yield struct.unpack_from(">II", data, inner[1] + 4)
        elif name == b"moov":
            yield from _tracks(walk, box)


_CODECS: Final = frozenset({b"av01", b"hvc1", b"hev1"})


def _tracks(walk: _Walk, movie: Box) -> Iterator[Size]:
    for track in walk.at(movie, b"trak"):
        for _, start, _ in walk.at(track, b"tkhd"):
            at = start + (88 if walk.data[start] == 1 else 76)
            width, height = struct.unpack_from(">II", walk.data, at)
            yield -(-width // 65_536), -(-height // 65_536)
        for kind, start, end in walk.at(track, b"mdia", b"minf", b"stbl", b"stsd"):
            for codec, entry, _ in walk.inside((kind, start + 8, end)):
                if codec in _CODECS:
                    yield struct.unpack_from(">HH", walk.data, entry + 24)


# JPEG 2000: the sizes in the file's header, and in its codestreams


def _read_jpeg2000(data: Data) -> Iterator[Size]:
    num_headers = num_codestreams = 0
    for kind, start, _ in _jpeg2000_parts(data):
        if kind == b"ihdr":
            num_headers += 1
            height, width = struct.unpack_from(">II", data, start)
            yield width, height
        else:
            num_codestreams += 1
            right, bottom, left, top = struct.unpack_from(">4I", data, start + 8)
            yield max(right - left, 0), max(bottom - top, 0)
    if not num_codestreams or (not num_headers and data[:4] != _CODESTREAM):
        raise _broken(ImageFormat.JPEG2000)


def _jpeg2000_parts(data: Data) -> Iterator[Box]:
    """Yield the headers and the codestreams of a file.

    Raises:
        InvalidMedia: A codestream is none.
    """
    if data[:4] == _CODESTREAM:
        yield b"jp2c", 0, len(data)
        return
    walk = _Walk(ImageFormat.JPEG2000, data)
    for box in walk.inside(walk.file):
        if box[0] == b"jp2h":
            yield from walk.at(box, b"ihdr")
        elif box[0] == b"jp2c":
            if data[box[1] : box[1] + 4] != _CODESTREAM:
                raise _broken(ImageFormat.JPEG2000)
            yield box


_CODESTREAM: Final = b"\xff\x4f\xff\x51"


# TIFF: every page, and its tiles


def _read_tiff(data: Data) -> Iterator[Size]:
    for entries in _directories(data):
        width, height, tile_width, tile_height = (entries.get(tag, 0) for tag in _TIFF_SIDES)
        yield width, height
        if tile_width or tile_height:
            yield tile_width, tile_height


_TIFF_SIDES: Final = (256, 257, 322, 323)
"""Tags: width and height of an image, and of its tiles."""
_TIFF_BITS, _TIFF_CHANNELS = 258, 277
_TIFF_INTEGERS: Final = {3: "H", 4: "I", 16: "Q"}


def _directories(data: Data) -> Iterator[dict[int, int]]:
    """Yield the tags above of each page, each with its largest value."""
    order = "<" if data[:2] == b"II" else ">"
    if data[2 if order == "<" else 3] == 43:
        number, first, count_layout = f"{order}Q", 8, f"{order}Q"  # a BigTIFF
        entry = struct.Struct(f"{order}HHQ8s")
    else:
        number, first, count_layout = f"{order}I", 4, f"{order}H"
        entry = struct.Struct(f"{order}HHI4s")
    (at,) = struct.unpack_from(number, data, first)
    seen: set[int] = set()
    num_tags = 0
    while at and at not in seen:
        seen.add(at)
        (num_entries,) = struct.unpack_from(count_layout, data, at)
        num_tags += num_entries + 1
        if num_tags > _MAX_TAGS:
            raise _too_long(ImageFormat.TIFF)
        start = at + struct.calcsize(count_layout)
        end = start + num_entries * entry.size
        found: dict[int, int] = {}
        for tag, kind, count, value in entry.iter_unpack(data[start:end]):
            # With several channels, the bits of each are elsewhere.
            if tag in _TIFF_SIDES or (tag in (_TIFF_BITS, _TIFF_CHANNELS) and count == 1):
                found[tag] = max(found.get(tag, 0), _tiff_value(order, kind, count, value))
        yield found
        (at,) = struct.unpack_from(number, data, end)


def _tiff_value(order: str, kind: int, count: int, value: bytes) -> int:
    layout = _TIFF_INTEGERS.get(kind)
    if layout is None or count != 1 or (layout == "Q" and len(value) < 8):
        raise _broken(ImageFormat.TIFF)
    (found,) = struct.unpack_from(order + layout, value)
    return int(found)


# BMP and ICO


def _read_bmp(data: Data) -> Iterator[Size]:
    yield _bitmap(data, 14, ImageFormat.BMP)


def _bitmap(data: Data, start: int, kind: ImageFormat) -> Size:
    """Return the size in the header of a device-independent bitmap."""
    (header_nbytes,) = struct.unpack_from("<I", data, start)
    if header_nbytes == 12:
        width, height = struct.unpack_from("<HH", data, start + 4)
        return width, height
    if header_nbytes not in (40, 52, 56, 64, 108, 124):
        raise _broken(kind)
    width, height = struct.unpack_from("<Ii", data, start + 4)
    if data[start + 11] != 0xFF:  # only then does Pillow take it for negative: upside down
        height &= 0xFFFF_FFFF
    return width, abs(height)


_PNG: Final = b"\x89PNG\r\n\x1a\n"


def _read_ico(data: Data) -> Iterator[Size]:
    (num_images,) = struct.unpack_from("<H", data, 4)
    for index in range(num_images):
        width, height, _, _, _, _, _, start = struct.unpack_from("<4BHHII", data, 6 + 16 * index)
        yield width or 256, height or 256
        if data[start : start + 8] == _PNG:
            yield struct.unpack_from(">II", data, start + 16)
        else:
            width, height = _bitmap(data, start, ImageFormat.ICO)
            yield width, -(-height // 2)  # the mask is below the image


# PNM


_PNM_SPACE: Final = re.compile(rb"(?:[ \t\n\v\f\r]|#[^\r\n]*[\r\n])*")
_PNM_NUMBER: Final = re.compile(rb"([0-9]{1,10})[ \t\n\v\f\r]")


def _read_pnm(data: Data) -> Iterator[Size]:
    header = bytes(data[:_MAX_PNM_HEADER_NBYTES])
    if b":" in header[:101].partition(b"\n")[0]:  # Pillow may take it for an IM file
        raise _broken(ImageFormat.PNM)
    width, height = islice(_pnm_numbers(data), 2)
    yield width, height


def _pnm_numbers(data: Data) -> Iterator[int]:
    header, at = bytes(data[:_MAX_PNM_HEADER_NBYTES]), 3
    while True:
        space = _PNM_SPACE.match(header, at)
        number = _PNM_NUMBER.match(header, space.end() if space else at)
        if number is None:
            is_cut = at + 16 > len(data)
            raise IndexError if is_cut else _broken(ImageFormat.PNM)
        yield int(number[1])
        at = number.end()


# TGA: without a magic number, so that the values have to be plausible


def _read_tga(data: Data) -> Iterator[Size]:
    yield struct.unpack_from("<HH", data, 12)


def is_deep_grey(data: Data) -> bool:
    """Return whether an image may have one channel of more than eight bits.

    Decoders reduce such an image in different ways. The answer for a broken header does not matter.
    """
    kind = format_of(data)
    try:
        match kind:
            case ImageFormat.PNG:
                return _is_deep_png(data)
            case ImageFormat.ICO:
                (num_images,) = struct.unpack_from("<H", data, 4)
                starts = (struct.unpack_from("<I", data, 18 + 16 * n)[0] for n in range(num_images))
                return any(_is_deep_png(data[start : start + 26]) for start in starts)
            case ImageFormat.TIFF:
                first = next(_directories(data), {})
                return first.get(_TIFF_CHANNELS, 1) == 1 and first.get(_TIFF_BITS, 1) > 8
            case ImageFormat.JPEG2000:
                return any(_is_deep(data, *part[:2]) for part in _jpeg2000_parts(data))
            case ImageFormat.PNM:
                return data[1:2] in (b"2", b"5") and list(islice(_pnm_numbers(data), 3))[2] > 255
    except (struct.error, IndexError, OverflowError, InvalidMedia):
        pass
    return False


def _is_deep_png(data: Data) -> bool:
    return bytes(data[:8]) == _PNG and bytes(data[24:26]) == b"\x10\0"


def _is_deep(data: Data, kind: bytes, start: int) -> bool:
    """Return whether a header or a codestream of JPEG 2000 has one channel of more than 8 bits."""
    num_channels, bits = struct.unpack_from(">HB", data, start + (8 if kind == b"ihdr" else 40))
    return bool(num_channels == 1 and bits & 0x7F > 7)


_READERS: Final[dict[ImageFormat, Callable[[Data], Iterator[Size]]]] = {
    ImageFormat.AVIF: partial(_read_boxes, ImageFormat.AVIF),
    ImageFormat.HEIC: partial(_read_boxes, ImageFormat.HEIC),
    ImageFormat.TIFF: _read_tiff,
    ImageFormat.BMP: _read_bmp,
    ImageFormat.ICO: _read_ico,
    ImageFormat.JPEG2000: _read_jpeg2000,
    ImageFormat.PNM: _read_pnm,
    ImageFormat.TGA: _read_tga,
}
