"""Search for audio that libsndfile does not return.

libsndfile reads as many samples of an MP3 as its first header says, or as the rate of its first
frame lets it guess, and only the first stream of an Ogg file. Files that were joined, as services
for speech do, have more.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Final

_FIRST_PAGE: Final = re.compile(rb"OggS\x00[\x02\x03\x06\x07]")
_LATER_PAGE: Final = re.compile(rb"OggS\x00[\x00\x01\x04\x05]")
"""Pages of Ogg by their flags: the first one of a stream, and others."""
_MP3_FRAME: Final = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb][\x10-\xef]")
"""Begin of a frame of layer III."""
_NUM_FRAMES: Final = 4
"""Frames that follow one another: other bytes look like one frame at times."""
_MAX_STARTS: Final = 10_000
"""Places to look at: more are in no file but in one that is to take time."""
_KBPS_1: Final = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_KBPS_2: Final = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_RATES_HZ: Final = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
_HEADER_NBYTES: Final = 4
MAX_MP3_BITS_PER_S: Final = 320_000


def is_chained(ogg: memoryview) -> bool:
    """Whether a stream of an Ogg file begins after another one."""
    later = _LATER_PAGE.search(ogg)
    return later is not None and _FIRST_PAGE.search(ogg, later.end()) is not None


def has_mp3_frames(data: memoryview) -> bool:
    """Whether several frames of an MP3 follow one another here."""
    starts = (found.start() for found in _MP3_FRAME.finditer(data))
    return any(_are_frames(data, start) for start in islice(starts, _MAX_STARTS))


def _are_frames(data: memoryview, at: int) -> bool:
    for _ in range(_NUM_FRAMES):
        nbytes = _frame_nbytes(data[at : at + _HEADER_NBYTES])
        if not nbytes or at + nbytes > len(data):
            return False
        at += nbytes
    return True


def _frame_nbytes(header: memoryview) -> int:
    """Return the length of a frame of layer III; 0 if it is none."""
    if _MP3_FRAME.match(header) is None or len(header) < _HEADER_NBYTES:
        return 0
    version, rate = header[1] >> 3 & 3, header[2] >> 2 & 3
    if rate == len(_RATES_HZ[version]):
        return 0
    is_first = version == max(_RATES_HZ)
    kbps = (_KBPS_1 if is_first else _KBPS_2)[header[2] >> 4]
    return (144 if is_first else 72) * kbps * 1000 // _RATES_HZ[version][rate] + (
        header[2] >> 1 & 1
    )
