"""Videos and audio clips for tests, in memory, made with PyAV and libsndfile."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import cast

import av
import numpy as np
import soundfile  # type: ignore[import-untyped]
from numpy.typing import NDArray

os.environ.setdefault("SVT_LOG", "1")  # SVT-AV1 logs errors only

Pixels = NDArray[np.uint8]
Samples = NDArray[np.float32]

ENCODERS = {
    "h264": ("libx264", "mp4", {"preset": "veryfast", "threads": "1"}),
    "hevc": ("libx265", "mp4", {"preset": "ultrafast", "x265-params": "log-level=none:pools=1"}),
    "vp8": ("libvpx", "webm", {"deadline": "realtime", "lag-in-frames": "16", "auto-alt-ref": "1"}),
    "vp9": ("libvpx-vp9", "webm", {"deadline": "realtime", "cpu-used": "8"}),
    "av1": ("libsvtav1", "mp4", {"preset": "12", "svtav1-params": "lp=1"}),
}
"""The encoder of each codec, a container for it, and fast settings."""


def drawn_frame(index: int, width: int = 160, height: int = 96) -> Pixels:
    """Return a frame of smooth, moving colours, with a white bar that shows its number."""
    x, y = np.arange(width), np.arange(height)[:, None]
    slope = np.sin((np.arange(width + height) + index) / 31)
    frame = np.empty((height, width, 3), np.uint8)
    frame[..., 0] = 128 + 100 * np.sin((x + 3 * index) / 23)
    frame[..., 1] = 128 + 100 * np.cos((y - 2 * index) / 17)
    frame[..., 2] = (128 + 100 * slope).astype(np.uint8)[x + y]
    at = index * 5 % (width - 8)
    frame[:16, at : at + 8] = 255
    return frame


def make_video(
    codec: str = "h264",
    *,
    num_frames: int = 32,
    width: int = 160,
    height: int = 96,
    rate: Fraction | int = 30,
    gop: int = 12,
    container: str = "",
    options: dict[str, str] | None = None,
    muxing: dict[str, str] | None = None,
    pixel_format: str = "yuv420p",
) -> bytes:
    """Return a video of `drawn_frame`s.

    Args:
        container: A format by its name in FFmpeg.
        options: Options of the encoder.
        muxing: Options of the container.
    """
    encoder, usual, quick = ENCODERS[codec]
    file = io.BytesIO()
    with (
        _as_scheduled(),
        av.open(file, "w", format=container or usual, options=muxing) as out,
    ):
        added = out.add_stream(encoder, rate=rate, options={**quick, **(options or {})})
        stream = cast(av.VideoStream, added)
        stream.width, stream.height, stream.pix_fmt = width, height, pixel_format
        stream.codec_context.thread_count = 1
        stream.codec_context.gop_size = gop
        for index in range(num_frames):
            frame = av.VideoFrame.from_ndarray(drawn_frame(index, width, height), format="rgb24")
            frame.pts = index
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()


@contextmanager
def _as_scheduled() -> Iterator[None]:
    """Restore the scheduling policy afterwards.

    SVT-AV1 makes its caller a real-time process where it may. Every process that the test starts
    later would inherit this, and could keep all others from the processor.
    """
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, param)


def turned(mp4: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """Return the file with a display matrix ``(a, b, c, d)``: x' = ax + cy, y' = bx + dy."""
    file = bytearray(mp4)
    at = file.index(b"tkhd") + 4 + 40
    a, b, c, d = (number << 16 for number in matrix)
    struct.pack_into(">9i", file, at, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    return bytes(file)


def tone(duration_s: float, rate_hz: int = 16_000, *, channels: int = 1, seed: int = 0) -> Samples:
    """Return ``(frames, channels)``: a rising tone, different in each channel, with some noise."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(duration_s * rate_hz)) / rate_hz
    audio = [
        0.4 * np.sin(2 * np.pi * (220 * (n + 1) + 90 * time) * time)
        + 0.01 * rng.standard_normal(len(time))
        for n in range(channels)
    ]
    return np.stack(audio, axis=1).astype(np.float32)


def make_audio(
    samples: Samples, rate_hz: int, form: str = "WAV", subtype: str | None = None
) -> bytes:
    """Return a file in one of libsndfile's formats: ``WAV``, ``FLAC``, ``OGG``, ``MP3``."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format=form, subtype=subtype)
    return file.getvalue()


def ogg_page(page: bytes, position: int) -> bytes:
    """Return an Ogg page with another position and a correct checksum."""
    page = page[:6] + struct.pack("<Q", position) + page[14:22] + bytes(4) + page[26:]
    checksum = 0
    for byte in page:
        checksum ^= byte << 24
        for _ in range(8):
            checksum = (checksum << 1 ^ (0x04C11DB7 if checksum >> 31 else 0)) & 0xFFFF_FFFF
    return page[:22] + struct.pack("<I", checksum) + page[26:]


def later(ogg: bytes, num_samples: int = 312) -> bytes:
    """Return an Ogg file whose time begins later, as some encoders write it: at their delay."""
    pages = [b"OggS" + page for page in ogg.split(b"OggS")[1:]]
    positions = [struct.unpack_from("<Q", page, 6)[0] for page in pages]
    return b"".join(
        ogg_page(page, position + num_samples) if position else page
        for page, position in zip(pages, positions, strict=True)
    )


def make_av_audio(samples: Samples, rate_hz: int, encoder: str, container: str) -> bytes:
    """Return a file by PyAV: ``("aac", "ipod")`` is M4A, ``("libopus", "webm")`` is WebM."""
    channels = samples.shape[1]
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        layout = {1: "mono", 2: "stereo"}[channels]
        stream = cast(av.AudioStream, out.add_stream(encoder, rate=rate_hz, layout=layout))
        size = stream.codec_context.frame_size or 1024
        resampler = av.AudioResampler(stream.codec_context.format, layout, rate_hz, size)
        frame = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(samples.T), format="fltp", layout=layout
        )
        frame.sample_rate, frame.pts = rate_hz, 0
        for piece in (*resampler.resample(frame), *resampler.resample(None)):
            out.mux(stream.encode(piece))
        out.mux(stream.encode(None))
    return file.getvalue()
