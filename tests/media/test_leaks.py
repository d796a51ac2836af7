"""Decoders free all their memory, as a worker runs for weeks."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

import pytest

from afferent.config import Limits
from afferent.media.decode.audio import decode_audio
from afferent.media.decode.video import open_video
from tests.media_files import make_av_audio, make_video, tone

_NUM_WARM, _NUM = 100, 400
_MOST_NBYTES_EACH = 100
"""A PyAV generator that is not closed leaks a read buffer of 148 bytes."""


class _MallInfo(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    )


def _allocated_nbytes() -> int:
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        pytest.skip("this C library has no mallinfo2")
    mallinfo2.restype = _MallInfo
    gc.collect()
    return int(mallinfo2().uordblks)


def _first_and_last_frame() -> None:
    with open_video(_VIDEO, Limits()) as video:
        for _ in video.frames([0, video.header.num_frames - 2]):
            pass


def _sound() -> None:
    decode_audio(_SOUND, 16_000, Limits())


_VIDEO = memoryview(make_video(num_frames=12))
_SOUND = memoryview(make_av_audio(tone(0.5), 16_000, "aac", "ipod"))


@pytest.mark.parametrize("decode", [_first_and_last_frame, _sound])
def test_decoding_leaves_no_memory_allocated(decode: Callable[[], None]) -> None:
    for _ in range(_NUM_WARM):
        decode()
    before = _allocated_nbytes()
    for _ in range(_NUM):
        decode()
    assert _allocated_nbytes() - before < _NUM * _MOST_NBYTES_EACH
