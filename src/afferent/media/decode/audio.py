"""Audio decoder: a file to mono samples at the model's rate, block by block.

libsndfile reads WAV, FLAC, Ogg and MP3; FFmpeg reads the audio of MP4 (M4A), WebM and Matroska.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Final

import numpy as np
import soundfile  # type: ignore[import-untyped]
import soxr  # type: ignore[import-untyped]
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.container import InputContainer
from numpy.typing import NDArray

from afferent.config import Limits
from afferent.errors import InvalidMedia, MediaTooLarge, UnsupportedMedia
from afferent.media.decode.container import BROKEN, decoder_of, open_container, packets_of
from afferent.media.decode.parts import MAX_MP3_BITS_PER_S, has_mp3_frames, is_chained
from afferent.media.decode.reading import Bytes, MemoryFile
from afferent.media.decoded import DecodedAudio
from afferent.media.headers.probe import AudioHeader

Samples = NDArray[np.float32]

_FORMATS: Final = frozenset(("WAV", "WAVEX", "FLAC", "OGG", "MP3"))
_ENCODINGS: Final = frozenset(
    (
        *("PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW"),
        *("VORBIS", "OPUS", "MPEG_LAYER_I", "MPEG_LAYER_II", "MPEG_LAYER_III"),
    )
)
_CODECS: Final = frozenset(("aac", "alac", "flac", "mp3", "opus", "vorbis"))
_DECODERS: Final = "aac,alac,flac,mp3,mp3float,opus,libopus,vorbis"
_BLOCK: Final = 1 << 14  # frames read at a time
_MIN_RATE_HZ: Final = 1000
_LOUDEST: Final = 10.0
"""A lossy codec, or a recording in floats, may slightly exceed 1; no valid sample reaches 10."""
_UNDECODABLE: Final = "the audio can't be decoded: its data are truncated or corrupt"
_BROKEN: Final = (*BROKEN, soundfile.LibsndfileError)


def load() -> None:
    """Allocate the memory for soundfile's callbacks before the process is confined.

    It is executable: a confined process can't allocate it, but can use it.
    """
    with contextlib.suppress(soundfile.LibsndfileError), MemoryFile(b"") as file, _Stream(file):
        pass


def probe_audio(data: Bytes, limits: Limits) -> AudioHeader:
    """Return the header of a file. Without a length, assume the longest accepted one.

    Raises:
        UnsupportedMedia: The container or the codec is not supported.
        InvalidMedia: No audio, or a broken one.
        MediaTooLarge: Longer, of more channels or of a higher rate than the limits allow.
    """
    with _open(data, limits) as source:
        return source.header


def decode_audio(data: Bytes, sample_rate_hz: int, limits: Limits) -> DecodedAudio:
    """Decode a whole file to mono at ``sample_rate_hz``.

    Raises:
        UnsupportedMedia: The container or the codec is not supported.
        InvalidMedia: It can't be decoded, or its samples are no numbers near -1 to 1.
        MediaTooLarge: It exceeds the limits, by its header or when decoded.
    """
    with _open(data, limits) as source:
        rate_hz = source.header.sample_rate_hz
        most = math.floor(limits.max_audio_s * rate_hz)
        # Untouched pages cost no memory.
        out = np.empty(math.ceil(limits.max_audio_s * sample_rate_hz) + 1, np.float32)
        resampler = soxr.ResampleStream(rate_hz, sample_rate_hz, 1, dtype="float32", quality="HQ")
        same = rate_hz == sample_rate_hz
        num_read = filled = 0
        for block in source.blocks():
            num_read += len(block)
            if num_read > most:
                raise _too_long(limits)
            mono = _mono(block)
            filled = _append(out, filled, mono if same else resampler.resample_chunk(mono))
        source.check_end()
        if not same:
            rest = resampler.resample_chunk(np.empty(0, np.float32), last=True)
            filled = _append(out, filled, rest)
    if filled == 0:
        raise InvalidMedia("the audio is empty")
    return DecodedAudio(out[:filled], sample_rate_hz)


def _append(out: Samples, filled: int, piece: Samples) -> int:
    piece = piece[: len(out) - filled]
    out[filled : filled + len(piece)] = piece
    return filled + len(piece)


def _mono(block: Samples) -> Samples:
    """Return the mean of the channels of ``(frames, channels)``."""
    mono: Samples = block[:, 0] if block.shape[1] == 1 else block.mean(axis=1, dtype=np.float32)
    # A NaN is not less than anything, so it is refused too.
    if len(block) and not np.abs(block).max() < _LOUDEST:
        raise InvalidMedia("the audio's samples are no numbers near -1 to 1")
    return np.ascontiguousarray(mono)


class _Source:
    """Open file: its header, and its samples as ``(frames, channels)``."""

    header: AudioHeader

    def blocks(self) -> Iterator[Samples]:
        raise NotImplementedError

    def check_end(self) -> None:
        """Check that the last block was the end of the audio.

        Raises:
            InvalidMedia: The file has more, which would be lost.
        """


class _Stream(soundfile.SoundFile):  # type: ignore[misc]
    """Stream that is read from begin to end.

    soundfile would seek after each block, which costs time and fails in a file without a length.
    """

    def seekable(self) -> bool:
        return False


class _SndFile(_Source):
    def __init__(self, file: _Stream, limits: Limits, data: MemoryFile) -> None:
        if file.format not in _FORMATS or file.subtype not in _ENCODINGS:
            raise UnsupportedMedia("the audio's encoding is none that is read")
        if file.subtype == "OPUS":
            file.seek(0)  # otherwise the encoder's delay is not skipped where time begins later
        self._file, self._data = file, data
        # The length of an MP3 may be a guess, by its first frame and its bytes.
        shortest_s = 8 * len(data.view) / MAX_MP3_BITS_PER_S
        is_guess = file.format == "MP3" and shortest_s <= limits.max_audio_s
        self.header = _checked(
            *(file.samplerate, file.channels, file.frames, limits), is_guess=is_guess
        )

    def blocks(self) -> Iterator[Samples]:
        block = np.empty((_BLOCK, self.header.num_channels), np.float32)
        while len(read := self._file.read(out=block)):
            yield read

    def check_end(self) -> None:
        """See `_Source`."""
        form = self._file.format
        with self._data.view as data, data[self._data.tell() :] as rest:
            if (form == "MP3" and has_mp3_frames(rest)) or (form == "OGG" and is_chained(data)):
                raise InvalidMedia(
                    "the audio file has several parts, or does not say its length, as an MP3 of "
                    "variable rate without a Xing header: its end would be lost; encode it as one "
                    "file"
                )


class _AvFile(_Source):
    def __init__(self, container: InputContainer, stream: AudioStream, limits: Limits) -> None:
        self._container, self._stream = container, stream
        context = stream.codec_context
        claimed_s = 0.0
        if stream.duration and stream.time_base:
            claimed_s = float(stream.duration * stream.time_base)
        elif container.duration:
            claimed_s = container.duration / 1_000_000
        num_frames = math.ceil(claimed_s * context.sample_rate)
        self.header = _checked(context.sample_rate, context.channels, num_frames, limits)

    def blocks(self) -> Iterator[Samples]:
        for packet in packets_of(self._container, self._stream):
            for frame in packet.decode():
                rate_hz, channels = frame.sample_rate, frame.layout.nb_channels
                if (rate_hz, channels) != (self.header.sample_rate_hz, self.header.num_channels):
                    raise InvalidMedia("the audio changes its rate or its channels")
                yield _to_float(frame, channels)


def _to_float(frame: AudioFrame, channels: int) -> Samples:
    array = frame.to_ndarray()
    planes = array if frame.format.is_planar else array.reshape(-1, channels).T
    if planes.dtype.kind == "i":
        planes = planes.astype(np.float32) / float(1 << (8 * planes.dtype.itemsize - 1))
    return planes.T.astype(np.float32, copy=False)


@contextmanager
def _open(data: Bytes, limits: Limits) -> Generator[_Source, None, None]:
    head = bytes(data[:12])
    try:
        if _is_sndfile(head):
            with MemoryFile(data) as file, _Stream(file) as stream:
                yield _SndFile(stream, limits, file)
        else:
            with open_container(data, "audio", {"codec_whitelist": _DECODERS}) as container:
                first = next(iter(container.streams.audio), None)
                track = decoder_of(container, first, "audio", _CODECS)
                yield _AvFile(container, track, limits)
    except _BROKEN as error:
        raise InvalidMedia(_UNDECODABLE) from error


def _is_sndfile(head: bytes) -> bool:
    if head[:4] in (b"RIFF", b"RF64") and head[8:] == b"WAVE":
        return True
    # An MP3 begins with a tag, or with a frame: eleven ones, then no reserved version or layer.
    is_mp3 = head[:3] == b"ID3" or (
        head[:1] == b"\xff" and len(head) > 1 and head[1] & 0xE0 == 0xE0 and head[1] & 6 != 0
    )
    return is_mp3 or head[:4] in (b"fLaC", b"OggS")


def _checked(
    rate_hz: int, channels: int, num_frames: int, limits: Limits, *, is_guess: bool = False
) -> AudioHeader:
    """Check a header.

    Args:
        num_frames: Its length; none, or far too much, if it is unknown.
        is_guess: Whether a length beyond the limit counts as unknown.
    """
    if rate_hz < _MIN_RATE_HZ or channels < 1:
        raise InvalidMedia(f"the audio has {channels} channels at {rate_hz} Hz")
    if channels > limits.max_audio_channels:
        raise MediaTooLarge(
            f"the audio has {channels} channels; at most {limits.max_audio_channels} are accepted "
            "(--max-audio-channels)"
        )
    if rate_hz > limits.max_audio_rate_hz:
        raise MediaTooLarge(
            f"the audio's rate is {rate_hz} Hz; at most {limits.max_audio_rate_hz} are accepted "
            "(--max-audio-rate-hz)"
        )
    most = math.floor(limits.max_audio_s * rate_hz)
    if num_frames <= 0 or num_frames >= 1 << 62 or (is_guess and num_frames > most):
        num_frames = most
    if num_frames > most:
        raise _too_long(limits)
    return AudioHeader(rate_hz, channels, num_frames)


def _too_long(limits: Limits) -> MediaTooLarge:
    return MediaTooLarge(
        f"the audio lasts longer than the {limits.max_audio_s:.0f} s accepted (--max-audio-s)"
    )
