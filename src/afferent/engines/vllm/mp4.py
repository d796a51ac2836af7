"""Check whether every decoder returns the same frames of an MP4. Pure.

vLLM decodes by OpenCV, Afferent by FFmpeg itself. The frames of H.264 and HEVC with eight bits per
colour are equal to the last bit. Other files differ:

- With more bits, colours are rounded by other rules.
- OpenCV ignores mirroring.
- OpenCV can't decode AV1.
- In WebM and Matroska, OpenCV guesses the number of frames.
"""

from __future__ import annotations

import struct
from itertools import islice
from typing import Final

from afferent.media.headers.boxes import Box, Buffer, boxes

_MAX_BOXES: Final = 4096
_ENTRY_NBYTES: Final = 78  # of a video's sample entry, before the boxes in it
_CONFIGURATIONS: Final = {b"avc1": b"avcC", b"avc3": b"avcC", b"hvc1": b"hvcC", b"hev1": b"hvcC"}
_EIGHT_BIT: Final = {b"avcC": frozenset({66, 77, 88, 100}), b"hvcC": frozenset({1})}
"""Profiles, by the box that names one in its second byte."""


def decodes_alike(file: Buffer) -> bool:
    """Whether this is such an MP4; False for a broken one.

    Args:
        file: The whole file.
    """
    try:
        return _decodes_alike(file)
    except (struct.error, IndexError):
        return False


def _decodes_alike(file: Buffer) -> bool:
    first, *_ = [*islice(boxes(file, 0, len(file)), 1), (b"", 0, 0)]
    movie = _inside(file, (b"", 0, len(file)), b"moov") if first[0] == b"ftyp" else None
    if movie is None:
        return False
    tracks = [box for box in islice(boxes(file, *movie[1:]), _MAX_BOXES) if box[0] == b"trak"]
    videos = [track for track in tracks if _handler(file, track) == b"vide"]
    return len(videos) == 1 and _is_upright(file, videos[0]) and _is_eight_bit(file, videos[0])


def _handler(file: Buffer, track: Box) -> bytes:
    found = _inside(file, track, b"mdia", b"hdlr")
    return bytes(file[found[1] + 8 : found[1] + 12]) if found else b""


def _is_upright(file: Buffer, track: Box) -> bool:
    """Whether a track is not mirrored; it may be rotated."""
    found = _inside(file, track, b"tkhd")
    if found is None:
        return False
    at = found[1] + (52 if file[found[1]] == 1 else 40)
    a, b, _, c, d = struct.unpack_from(">5i", file, at)
    return bool(a * d - b * c > 0)


def _is_eight_bit(file: Buffer, track: Box) -> bool:
    table = _inside(file, track, b"mdia", b"minf", b"stbl", b"stsd")
    if table is None:
        return False
    entries = list(islice(boxes(file, table[1] + 8, table[2]), 2))
    if len(entries) != 1 or entries[0][0] not in _CONFIGURATIONS:
        return False
    kind, begin, end = entries[0]
    wanted = _CONFIGURATIONS[kind]
    found = _inside(file, (kind, begin + _ENTRY_NBYTES, end), wanted)
    return found is not None and file[found[1] + 1] & 0x7F in _EIGHT_BIT[wanted]


def _inside(file: Buffer, box: Box, *path: bytes) -> Box | None:
    """Return the first box at the end of a path of kinds."""
    found: Box | None = box
    for kind in path:
        if found is None:
            return None
        inner = islice(boxes(file, found[1], found[2]), _MAX_BOXES)
        found = next((each for each in inner if each[0] == kind), None)
    return found
