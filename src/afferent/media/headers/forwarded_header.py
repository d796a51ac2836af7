"""Sizes of images in formats that only a server behind this one decodes.

Only sizes are read, in bounded time; nothing is decoded. A file with several images is as large as
the largest of them. Sizes that a header repeats elsewhere (a codestream, a tile, an image within an
icon) count, too: a decoder may use any of them.

The first bytes determine the format, as in Pillow, which vLLM uses. A file that Pillow could take
for another format is refused.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import islice
from typing import Final

from afferent.errors import InvalidMedia, UnsupportedMedia
from afferent.media.headers.boxes import Box, boxes
from afferent.media.headers.header import Data

Size = tuple[int, int]
"""Width and height in pixels."""

_MAX_BOXES: Final = 4096
_MAX_IMAGES: Final = 1024
_MAX_TAGS: Final = 16_384
"""Most tags of all images of a TIFF file together."""
_MAX_PNM_HEADER_NBYTES: Final = 4096


class ForwardedFormat(StrEnum):
    AVIF = "AVIF"
    TIFF = "TIFF"
    BMP = "BMP"
    ICO = "ICO"
    JPEG2000 = "JPEG 2000"
    PNM = "PNM"
    TGA = "TGA"


def read_sizes(data: Data) -> list[Size]:
    """Return the sizes of all images in a file, one at least, and none without pixels.

    Raises:
        UnsupportedMedia: The file has none of these formats.
        InvalidMedia: The header is broken, or longer than any honest one.
    """
    kind = _format_of(data)
    try:
        sizes = list(islice(_READERS[kind](data), _MAX_IMAGES + 1))
    except (struct.error, IndexError, OverflowError) as error:
        raise InvalidMedia(f"the image's {kind} header is cut off") from error
    if not sizes or min(map(min, sizes)) < 1:
        raise InvalidMedia(f"the image's {kind} header names no size")
    if len(sizes) > _MAX_IMAGES:
        raise _too_long(kind)
    return sizes


def _format_of(data: Data) -> ForwardedFormat:
    magic = bytes(data[:18])
    for kind, pattern in _MAGIC.items():
        if pattern.match(magic):
            return kind
    raise UnsupportedMedia("the bytes are not those of an image of a format that is known here")


def _too_long(kind: ForwardedFormat) -> InvalidMedia:
    return InvalidMedia(f"the image's {kind} header is longer than any honest one")


def _broken(kind: ForwardedFormat) -> InvalidMedia:
    return InvalidMedia(f"the image's {kind} header is broken")


class _Walk:
    """Boxes of one file; the number of visited boxes is limited."""

    def __init__(self, kind: ForwardedFormat, data: Data) -> None:
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


# AVIF: the sizes of all items, and of all tracks


def _read_avif(data: Data) -> Iterator[Size]:
    walk = _Walk(ForwardedFormat.AVIF, data)
    for box in walk.inside(walk.file):
        kind, start, end = box
        if kind == b"meta":
            for inner in walk.at((kind, start + 4, end), b"iprp", b"ipco", b"ispe"):
                yield struct.unpack_from(">II", data, inner[1] + 4)
        elif kind == b"moov":
            yield from _avif_tracks(walk, box)


def _avif_tracks(walk: _Walk, movie: Box) -> Iterator[Size]:
    for track in walk.at(movie, b"trak"):
        for _, start, _ in walk.at(track, b"tkhd"):
            at = start + (88 if walk.data[start] == 1 else 76)
            width, height = struct.unpack_from(">II", walk.data, at)
            yield -(-width // 65_536), -(-height // 65_536)
        for kind, start, end in walk.at(track, b"mdia", b"minf", b"stbl", b"stsd"):
            for _, entry, _ in walk.at((kind, start + 8, end), b"av01"):
                yield struct.unpack_from(">HH", walk.data, entry + 24)


# JPEG 2000: the sizes in the file's header, and in its codestreams


def _read_jpeg2000(data: Data) -> Iterator[Size]:
    if data[:4] == b"\xff\x4f\xff\x51":
        yield from _codestream(data, 0)
        return
    walk = _Walk(ForwardedFormat.JPEG2000, data)
    num_headers = num_codestreams = 0
    for box in walk.inside(walk.file):
        if box[0] == b"jp2h":
            for _, start, _ in walk.at(box, b"ihdr"):
                height, width = struct.unpack_from(">II", data, start)
                num_headers += 1
                yield width, height
        elif box[0] == b"jp2c":
            num_codestreams += 1
            yield from _codestream(data, box[1])
    if not num_headers or not num_codestreams:
        raise _broken(ForwardedFormat.JPEG2000)


def _codestream(data: Data, start: int) -> Iterator[Size]:
    if data[start : start + 4] != b"\xff\x4f\xff\x51":
        raise _broken(ForwardedFormat.JPEG2000)
    right, bottom, left, top = struct.unpack_from(">4I", data, start + 8)
    yield max(right - left, 0), max(bottom - top, 0)


# TIFF: every page, and its tiles


def _read_tiff(data: Data) -> Iterator[Size]:
    order = "<" if data[:2] == b"II" else ">"
    if data[2 if order == "<" else 3] == 43:
        number_width, first = "Q", 8  # a BigTIFF
        count_layout, entry_nbytes = f"{order}Q", 20
    else:
        number_width, first = "I", 4
        count_layout, entry_nbytes = f"{order}H", 12
    (at,) = struct.unpack_from(order + number_width, data, first)
    seen: set[int] = set()
    num_tags = 0
    while at and at not in seen:
        seen.add(at)
        (num_entries,) = struct.unpack_from(count_layout, data, at)
        num_tags += num_entries + 1
        if num_tags > _MAX_TAGS:
            raise _too_long(ForwardedFormat.TIFF)
        entries = at + struct.calcsize(count_layout)
        yield from _tiff_sizes(data, order, entries, num_entries, entry_nbytes)
        (at,) = struct.unpack_from(order + number_width, data, entries + num_entries * entry_nbytes)


_TIFF_SIDES: Final = {256: 0, 257: 1, 322: 2, 323: 3}
"""Tags: width and height of an image, and of its tiles."""
_TIFF_INTEGERS: Final = {3: "H", 4: "I", 16: "Q"}


def _tiff_sizes(
    data: Data, order: str, entries: int, num_entries: int, entry_nbytes: int
) -> Iterator[Size]:
    """Yield the size of one page and of its tiles: the largest value of each side."""
    sides = [0, 0, 0, 0]
    value_at = entry_nbytes - (8 if entry_nbytes == 20 else 4)
    count_layout = order + ("Q" if entry_nbytes == 20 else "I")
    for at in range(entries, entries + num_entries * entry_nbytes, entry_nbytes):
        tag, kind = struct.unpack_from(f"{order}HH", data, at)
        if (index := _TIFF_SIDES.get(tag)) is None:
            continue
        (count,) = struct.unpack_from(count_layout, data, at + 4)
        layout = _TIFF_INTEGERS.get(kind)
        if layout is None or count != 1 or (layout == "Q" and entry_nbytes != 20):
            raise _broken(ForwardedFormat.TIFF)
        (side,) = struct.unpack_from(order + layout, data, at + value_at)
        sides[index] = max(sides[index], side)
    width, height, tile_width, tile_height = sides
    yield width, height
    if tile_width or tile_height:
        yield tile_width, tile_height


# BMP and ICO


def _read_bmp(data: Data) -> Iterator[Size]:
    yield _bitmap(data, 14, ForwardedFormat.BMP)


def _bitmap(data: Data, start: int, kind: ForwardedFormat) -> Size:
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


def _read_ico(data: Data) -> Iterator[Size]:
    (num_images,) = struct.unpack_from("<H", data, 4)
    for index in range(num_images):
        width, height, _, _, _, _, _, start = struct.unpack_from("<4BHHII", data, 6 + 16 * index)
        yield width or 256, height or 256
        if data[start : start + 8] == b"\x89PNG\r\n\x1a\n":
            yield struct.unpack_from(">II", data, start + 16)
        else:
            width, height = _bitmap(data, start, ForwardedFormat.ICO)
            yield width, -(-height // 2)  # the mask is below the image


# PNM


_PNM_SPACE: Final = re.compile(rb"(?:[ \t\n\v\f\r]|#[^\r\n]*[\r\n])*")
_PNM_NUMBER: Final = re.compile(rb"([0-9]{1,10})[ \t\n\v\f\r]")


def _read_pnm(data: Data) -> Iterator[Size]:
    header = bytes(data[:_MAX_PNM_HEADER_NBYTES])
    if b":" in header[:101].partition(b"\n")[0]:  # Pillow may take it for an IM file
        raise _broken(ForwardedFormat.PNM)
    sides, at = [], 3
    for _ in range(2):
        space = _PNM_SPACE.match(header, at)
        number = _PNM_NUMBER.match(header, space.end() if space else at)
        if number is None:
            is_cut = number is None and at + 16 > len(data)
            raise IndexError if is_cut else _broken(ForwardedFormat.PNM)
        sides.append(int(number[1]))
        at = number.end()
    yield sides[0], sides[1]


# TGA: without a magic number, so that the values have to be plausible


def _read_tga(data: Data) -> Iterator[Size]:
    yield struct.unpack_from("<HH", data, 12)


_FTYP: Final = rb"\x00{3}[\x10-\xff]ftyp(?:avif|avis|mif1|msf1)"
_TGA: Final = (
    # The length of a name, without those by which PCX, IM and IPTC files begin.
    rb"[\x00-\x09\x0b\x0c\x0e-\x19\x1b\x1d-\x1f]"
    # True colour or grey without a palette, or colours out of a palette that begins at its start.
    rb"(?:\x00[\x02\x03\x0a\x0b]\x00{5}|\x01[\x01\x09]\x00\x00..[\x10\x18\x20])"
    rb".{8}[\x01\x08\x10\x18\x20]."
)
_MAGIC: Final[dict[ForwardedFormat, re.Pattern[bytes]]] = {
    kind: re.compile(pattern, re.DOTALL)
    for kind, pattern in {
        ForwardedFormat.AVIF: _FTYP,
        ForwardedFormat.TIFF: rb"II[*+]\x00|MM\x00[*+]",
        ForwardedFormat.BMP: rb"BM",
        ForwardedFormat.ICO: rb"\x00\x00\x01\x00",
        ForwardedFormat.JPEG2000: rb"\xff\x4f\xff\x51|\x00{3}\x0cjP  \r\n\x87\n",
        ForwardedFormat.PNM: rb"P[1-6][ \t\n\v\f\r]",
        ForwardedFormat.TGA: _TGA,
    }.items()
}
_READERS: Final[dict[ForwardedFormat, Callable[[Data], Iterator[Size]]]] = {
    ForwardedFormat.AVIF: _read_avif,
    ForwardedFormat.TIFF: _read_tiff,
    ForwardedFormat.BMP: _read_bmp,
    ForwardedFormat.ICO: _read_ico,
    ForwardedFormat.JPEG2000: _read_jpeg2000,
    ForwardedFormat.PNM: _read_pnm,
    ForwardedFormat.TGA: _read_tga,
}
