"""Video and audio containers, opened by FFmpeg, which can access no other file."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NoReturn, TypeVar

import av
import av.error
import av.logging
from av.audio.stream import AudioStream
from av.codec.context import ThreadType
from av.container import InputContainer
from av.packet import Packet
from av.stream import Discard
from av.video.stream import VideoStream

from afferent.errors import InvalidMedia, UnsupportedMedia
from afferent.media.decode.mp4 import check_tables
from afferent.media.decode.reading import Bytes, MemoryFile
from afferent.media.headers.image_format import is_still

Track = TypeVar("Track", AudioStream, VideoStream)

av.logging.set_level(None)  # FFmpeg's messages on hostile bytes would fill the log

_MP4_STARTS: Final = frozenset((b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"))
_OPTIONS: Final = {"protocol_whitelist": "none", "max_streams": "64", "threads": "1"}
_MP4_OPTIONS: Final = {"enable_drefs": "0", "use_absolute_path": "0"}
_READ_NBYTES: Final = 1 << 16

BROKEN: Final = (av.error.FFmpegError, ValueError, OverflowError, MemoryError)
"""Exceptions of PyAV on invalid bytes."""


@contextmanager
def open_container(data: Bytes, what: str, options: Mapping[str, str]) -> Iterator[InputContainer]:
    """Open a file.

    Args:
        what: ``video`` or ``audio``, for the message.
        options: FFmpeg's options; ``codec_whitelist`` names the allowed decoders.

    Raises:
        UnsupportedMedia: The file is not MP4, QuickTime, Matroska or WebM.
        MediaTooLarge: An MP4 file's tables claim too many samples.
        InvalidMedia: Its MP4 boxes are invalid.
    """
    name = _format_of(data, what)
    options = {**_OPTIONS, **options}
    if name == "mov":
        check_tables(data)
        options |= _MP4_OPTIONS
    with (
        MemoryFile(data) as file,
        av.open(
            file,
            "r",
            format=name,
            options=options,
            metadata_errors="replace",
            buffer_size=_READ_NBYTES,
            io_open=_refuse,
        ) as container,
    ):
        yield container


def decoder_of(
    container: InputContainer, track: Track | None, what: str, codecs: Collection[str]
) -> Track:
    """Return ``track``, ready to decode in this thread alone; other tracks are not read.

    Args:
        what: As for `open_container`.
        codecs: Names of the allowed codecs.

    Raises:
        InvalidMedia: There is no such track.
        UnsupportedMedia: Its codec is none of them.
    """
    if track is None:
        raise InvalidMedia(f"the file holds no {what}")
    for other in container.streams:
        if other is not track:
            other.discard = Discard.all
    context = track.codec_context
    if context is None or context.codec.canonical_name not in codecs:
        raise UnsupportedMedia(f"the {what}'s codec is none of {', '.join(sorted(codecs))}")
    context.thread_count, context.thread_type = 1, ThreadType.NONE
    return track


def packets_of(container: InputContainer, track: Track) -> Iterator[Packet[Track]]:
    """Yield the packets of a track.

    PyAV's own generator leaks its read buffer if it is dropped before its end; this one closes it.
    """
    yield from container.demux(track)


def _format_of(data: Bytes, what: str) -> str:
    """Return FFmpeg's name of the format, by the first bytes.

    FFmpeg's own detection would also find playlists and scripts that name other files; it is not
    used.
    """
    head = bytes(data[:12])
    if head[4:8] in _MP4_STARTS and not is_still(head):
        return "mov"
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    raise UnsupportedMedia(f"the {what}'s bytes are not those of a format that is read")


def _refuse(*_: object) -> NoReturn:
    raise PermissionError("a media file may name no other file")
