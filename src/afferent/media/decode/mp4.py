"""Count of the samples that the tables of an MP4 file claim, before FFmpeg reads them.

When FFmpeg opens a file, it allocates about 70 bytes for each sample of a table. A table of samples
of equal size takes twenty bytes for any number of samples: 2 kB became 1.4 GB.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

import numpy as np

from afferent.errors import InvalidMedia, MediaTooLarge
from afferent.media.decode.reading import Bytes

MAX_SAMPLES: Final = 1 << 20
"""Limit for all tracks: an hour of video at 100 frames a second, and of its audio."""

_CONTAINERS: Final = frozenset(
    b"moov trak mdia minf stbl mvex moof traf dinf edts udta tref gmhd wave".split()
)
_TABLES: Final = frozenset((b"stsz", b"stz2", b"stts", b"stsc", b"stco", b"co64"))
_PCM_PACKET: Final = 1024  # samples of audio that FFmpeg combines
_MAX_BOXES: Final = 1 << 19
_MAX_DEPTH: Final = 12

_Range = tuple[int, int]


def check_tables(data: Bytes) -> None:
    """Refuse a file whose tables claim more than `MAX_SAMPLES` in all.

    Raises:
        MediaTooLarge: They do.
        InvalidMedia: The boxes are nested too deeply, too many, or compressed.
    """
    _Boxes(memoryview(data).cast("B")).count()


class _Boxes:
    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._num_boxes = 0

    def count(self) -> int:
        return self._samples((0, len(self._view)), depth=0, audio=False)[0]

    def _samples(self, within: _Range, *, depth: int, audio: bool) -> tuple[int, int]:
        """Return the samples and the edits that boxes claim: each edit plays its track again."""
        if depth > _MAX_DEPTH:
            raise InvalidMedia("the file's MP4 boxes are nested beyond reason")
        samples, edits = 0, 0
        tables: dict[bytes, _Range] = {}
        for name, start, stop in self._boxes(*within):
            if name == b"hdlr":
                # QuickTime has further ones, for the access to data.
                kind = bytes(self._view[start + 8 : start + 12])
                audio = kind == b"soun" or (audio and kind != b"vide")
            elif name in _CONTAINERS:
                inner, again = self._samples((start, stop), depth=depth + 1, audio=audio)
                if name == b"trak":
                    inner, again = inner * max(1, again), 0
                samples, edits = samples + inner, edits + again
            elif name == b"trun":
                samples += self._number((start, stop), 4)
            elif name == b"elst":
                edits += self._number((start, stop), 4)
            elif name in _TABLES:
                tables[name] = (start, stop)
            elif name == b"cmov":
                raise InvalidMedia("the file's MP4 header is compressed")
        samples += self._in_tables(tables, audio)
        if samples > MAX_SAMPLES:
            raise MediaTooLarge(f"the file has more than {MAX_SAMPLES} samples in its tracks")
        return samples, edits

    def _boxes(self, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield name, begin and end of the contents of each box."""
        while at + 8 <= end:
            self._num_boxes += 1
            if self._num_boxes > _MAX_BOXES:
                raise InvalidMedia("the file has more MP4 boxes than any honest one")
            nbytes, name = struct.unpack_from(">I4s", self._view, at)
            start = at + 8
            if nbytes == 1 and start + 8 <= end:
                (nbytes,) = struct.unpack_from(">Q", self._view, start)
                start += 8
            at = end if nbytes == 0 else min(max(at + nbytes, start), end)
            yield name, start, at

    def _in_tables(self, tables: dict[bytes, _Range], audio: bool) -> int:
        """Return the number of entries that FFmpeg allocates for one track."""
        is_pcm = audio and self._number(tables.get(b"stts"), 4) == 1
        if is_pcm and self._number(tables.get(b"stts"), 12) == 1:
            # Each sample lasts one tick, and FFmpeg combines them chunk by chunk in larger packets.
            chunks = sum(self._number(tables.get(name), 4) for name in (b"stco", b"co64"))
            return chunks * -(-self._longest_chunk(tables.get(b"stsc")) // _PCM_PACKET)
        return sum(self._number(tables.get(name), 8) for name in (b"stsz", b"stz2"))

    def _longest_chunk(self, table: _Range | None) -> int:
        """Return the largest chunk of a table of (first chunk, samples per chunk, description)."""
        start, stop = table or (0, 0)
        rows = np.frombuffer(self._view[start + 8 : stop], np.uint8)
        rows = rows[: rows.size // 12 * 12].view(">u4").reshape(-1, 3)
        return int(rows[:, 1].max(initial=0))

    def _number(self, table: _Range | None, at: int) -> int:
        """Return the 32-bit number at byte ``at`` of a table; 0 if it is missing."""
        start, stop = table or (0, 0)
        at += start
        return int.from_bytes(self._view[at : at + 4], "big") if at + 4 <= stop else 0
