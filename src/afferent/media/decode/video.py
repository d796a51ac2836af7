"""Video decoder: a file to its frames, one at a time, upright and in RGB."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from afferent.config import Limits
from afferent.errors import InvalidMedia
from afferent.media.decode.animation import is_animation, open_animation
from afferent.media.decode.container import BROKEN, decoder_of, open_container, packets_of
from afferent.media.decode.reading import Bytes
from afferent.media.decode.video_limits import (
    check_decoded,
    check_length,
    check_pixels,
    too_many,
)
from afferent.media.decoded import Pixels, Video
from afferent.media.headers.probe import VideoHeader

CODECS: Final = ("h264", "hevc", "vp8", "vp9", "av1")
_DECODERS: Final = "h264,hevc,vp8,vp9,libdav1d,av1"
_MAX_DELAY: Final = 128  # packets before a decoder gives its first frame
_DEFAULT_RATE: Final = 24.0
_QUARTERS: Final = (
    *((False, False, False), (True, True, False)),
    *((False, True, True), (True, False, True)),
)
"""Transformations of a frame by quarter turns, clockwise; see `_turns`."""
_UNDECODABLE: Final = "the video can't be decoded: its data are truncated or corrupt"


@contextmanager
def open_video(data: Bytes, limits: Limits) -> Iterator[Video]:
    """Open a video and count its packets; frames are decoded on request.

    Raises:
        UnsupportedMedia: The container or the codec is not supported.
        InvalidMedia: No video, or a broken one.
        MediaTooLarge: Longer, larger or of more frames than the limits allow.
    """
    if is_animation(data):
        yield open_animation(data, limits)
        return
    try:
        with _open(data, limits) as (container, stream):
            walked = _walk(container, stream, limits)
            claimed = _rate(stream.average_rate)
        with _open(data, limits) as (container, stream):
            width, height = _size(_first_frame(container, stream))
    except BROKEN as error:
        raise InvalidMedia(_UNDECODABLE) from error
    header = VideoHeader(width, height, len(walked.shown), walked.frames_per_s(claimed))
    yield _OpenVideo(data, limits, header, walked)


@dataclass(frozen=True, slots=True)
class _Walked:
    """Result of a pass over the packets, in the stream's own ticks.

    Attributes:
        shown: Presentation time of each frame, in order.
        key_times: Presentation times of the key frames, in order.
        key_packets: Packet of each key frame, counted from the start.
    """

    shown: NDArray[np.int64]
    key_times: NDArray[np.int64]
    key_packets: NDArray[np.int64]
    tick_s: float

    def entry(self, time: int) -> int:
        """Return the packet to decode from for the frame shown at ``time``."""
        at = int(np.searchsorted(self.key_times, time, side="right")) - 1
        return int(self.key_packets[at]) if at >= 0 else 0

    def frames_per_s(self, claimed: float | None) -> float:
        """Return the container's rate if the frames' times confirm it, else the counted one.

        The frames' times are rounded, and the display time of the last frame is only in the
        container.
        """
        num_frames = len(self.shown)
        if num_frames < 2:
            return claimed or _DEFAULT_RATE
        counted = (num_frames - 1) / (float(self.shown[-1] - self.shown[0]) * self.tick_s)
        apart = max(0.01, 2 / num_frames)
        return claimed if claimed and abs(claimed / counted - 1) < apart else counted


@dataclass(frozen=True, slots=True)
class _OpenVideo:
    _data: Bytes
    _limits: Limits
    header: VideoHeader
    _walked: _Walked

    def frames(self, indices: Sequence[int]) -> Iterator[Pixels]:
        """Implement `afferent.media.decoded.Video.frames`."""
        check_decoded(len(set(indices)), self.header.width, self.header.height, self._limits)
        times = self._walked.shown[np.asarray(indices, np.int64)].tolist()
        return self._decoded(times)

    def _decoded(self, times: list[int]) -> Iterator[Pixels]:
        reformatter = VideoReformatter()
        pixels: Pixels | None = None
        last = None
        frames = self._wanted(sorted(set(times)))
        try:
            for time in times:
                if time != last or pixels is None:
                    pixels, last = _upright(next(frames), reformatter), time
                    if pixels.shape[:2] != (self.header.height, self.header.width):
                        raise InvalidMedia("the video's frames change their size")
                yield pixels
        except StopIteration:
            raise InvalidMedia(_UNDECODABLE) from None
        except BROKEN as error:
            raise InvalidMedia(_UNDECODABLE) from error
        finally:
            frames.close()

    def _wanted(self, times: list[int]) -> Generator[VideoFrame, None, None]:
        """Yield a frame for each of these times; decode only the frames that these need.

        If the decoder omits a frame, as it may at the begin of a cut recording, the next one
        replaces it.
        """
        wanted = iter(times)
        time = next(wanted)
        entry = self._walked.entry(time)
        sought = frozenset(times)
        with _open(self._data, self._limits) as (container, stream):
            context = stream.codec_context
            for number, packet in enumerate(packets_of(container, stream)):
                if number < entry:
                    continue
                # A frame without references that is not requested need not be decoded.
                context.skip_frame = "DEFAULT" if packet.pts in sought else "NONREF"
                for frame in context.decode(packet):
                    while frame.pts is not None and frame.pts >= time:
                        yield frame
                        if (following := next(wanted, None)) is None:
                            return
                        time = following
                    if (entry := self._walked.entry(time)) > number:
                        context.flush_buffers()
                        break


@contextmanager
def _open(data: Bytes, limits: Limits) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open the file and its first video track, ready to decode in this thread alone."""
    # A frame is coded in blocks of up to 128 pixels, so that it may be larger than its visible
    # part.
    max_pixels = limits.max_frame_pixels * 5 // 4
    options = {"codec_whitelist": _DECODERS, "max_pixels": str(max_pixels)}
    with open_container(data, "video", options) as container:
        first = next(iter(container.streams.video), None)
        stream = decoder_of(container, first, "video", CODECS)
        context = stream.codec_context
        check_pixels(context.width, context.height, limits)
        context.options = {"max_pixels": str(max_pixels)}
        context.open(strict=False)  # dav1d reads only now which frames to skip: none
        yield container, stream


def _walk(container: InputContainer, stream: VideoStream, limits: Limits) -> _Walked:
    """Count the frames without decoding one."""
    if stream.time_base is None:
        raise InvalidMedia("the video's frames have no times")
    shown: list[int] = []
    keys: list[tuple[int, int]] = []
    invisible = _is_invisible if stream.codec_context.name == "vp8" else _is_empty
    for number, packet in enumerate(packets_of(container, stream)):
        if number > limits.max_video_frames:
            raise too_many(limits)
        if packet.is_discard or invisible(packet):
            continue
        if packet.pts is None:
            raise InvalidMedia("the video's frames have no times")
        shown.append(packet.pts)
        if packet.is_keyframe:
            keys.append((packet.pts, number))
    if not shown:
        raise InvalidMedia("the video has no frames")
    keys.sort()
    walked = _Walked(
        shown=np.unique(np.array(shown, np.int64)),
        key_times=np.array([time for time, _ in keys], np.int64),
        key_packets=np.array([number for _, number in keys], np.int64),
        tick_s=float(stream.time_base),
    )
    check_length(len(shown), float(walked.shown[-1] - walked.shown[0]) * walked.tick_s, limits)
    return walked


def _is_empty(packet: Packet[VideoStream]) -> bool:
    return packet.size == 0


def _is_invisible(packet: Packet[VideoStream]) -> bool:
    """Return whether a frame is only a reference: VP8's ``show_frame`` bit is 0."""
    return packet.size == 0 or not memoryview(packet)[0] & 0x10


def _first_frame(container: InputContainer, stream: VideoStream) -> VideoFrame:
    for number, packet in enumerate(packets_of(container, stream)):
        for frame in stream.codec_context.decode(packet):
            return frame
        if number > _MAX_DELAY:
            break
    raise InvalidMedia(_UNDECODABLE)


def _turns(frame: VideoFrame) -> tuple[bool, bool, bool]:
    """Return whether to transpose a frame, then flip it left to right, then upside down."""
    side_data: Any = frame.side_data  # PyAV's types are wrong here
    try:
        matrix = side_data["DISPLAYMATRIX"]
    except KeyError:
        return False, False, False
    except ValueError:  # there is other side data that PyAV has no name for
        return _QUARTERS[round(-frame.rotation / 90) % 4]
    a, b, _, c, d = np.frombuffer(matrix, np.int32)[:5].astype(np.int64).tolist()
    if abs(a) + abs(d) >= abs(b) + abs(c):
        return False, a < 0, d < 0
    return True, c < 0, b < 0


def _size(frame: VideoFrame) -> tuple[int, int]:
    """Return width and height, upright."""
    return (frame.height, frame.width) if _turns(frame)[0] else (frame.width, frame.height)


def _upright(frame: VideoFrame, reformatter: VideoReformatter) -> Pixels:
    rgb = reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
    transposed, mirrored, upside_down = _turns(frame)
    if transposed:
        rgb = rgb.transpose(1, 0, 2)
    rgb = rgb[:: -1 if upside_down else 1, :: -1 if mirrored else 1]
    return np.ascontiguousarray(rgb, np.uint8)


def _rate(claimed: Fraction | None) -> float | None:
    rate = float(claimed) if claimed else 0.0
    return rate if 0.0 < rate < 100_000.0 else None
