"""Boxes of ISO media files (MP4, AVIF, JPEG 2000): their kinds and positions. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterator

Buffer = bytes | memoryview
Box = tuple[bytes, int, int]
"""Kind of a box, and the begin and end of its content."""


def boxes(file: Buffer, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes between two offsets, one after another, up to the first malformed one.

    Raises:
        struct.error: The last one is cut.
    """
    while start + 8 <= stop:
        nbytes, kind = struct.unpack_from(">I4s", file, start)
        head = 8
        if nbytes == 1:
            (nbytes,), head = struct.unpack_from(">Q", file, start + 8), 16
        elif nbytes == 0:
            nbytes = stop - start
        if nbytes < head or start + nbytes > stop:
            return
        yield kind, start + head, start + nbytes
        start += nbytes
