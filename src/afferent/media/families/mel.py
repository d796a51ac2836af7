"""Log-mel spectra as Whisper's feature extractor makes them, in float32 and in little memory."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from afferent.errors import UnsupportedModel
from afferent.media.headers.probe import AudioHeader
from afferent.types import TensorSpec

Samples = NDArray[np.float32]

_HIGHEST_HZ: Final = 8000.0
_FLOOR: Final = 1e-10
_BLOCK: Final = 512  # spectra computed at a time
_LINEAR_HZ: Final = 1000.0  # Slaney's scale is linear up to here, with 3 mels for 200 Hz
_LINEAR_MELS: Final = 15.0
_LOG_STEP: Final = math.log(6.4) / 27.0


class LogMel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a feature extractor, by the names of its file."""

    feature_size: int = 80
    sampling_rate: int = 16_000
    hop_length: int = 160
    chunk_length: int = 30
    n_fft: int = 400

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> LogMel:
        """Return the settings of ``preprocessor_config.json``.

        Raises:
            UnsupportedModel: It adds noise, or its chunks are no whole number of spectra.
        """
        if settings.get("dither", 0.0) != 0.0:
            raise UnsupportedModel("the model's feature extractor adds noise")
        given = {name: int(settings[name]) for name in cls.__struct_fields__ if name in settings}
        mel = cls(**given)
        if min(given.values(), default=1) < 1 or mel.chunk_samples % mel.hop_length != 0:
            raise UnsupportedModel("the settings of the model's feature extractor make no sense")
        return mel

    def num_samples(self, header: AudioHeader) -> int:
        """Return the number of a clip's samples at this rate."""
        return header.num_samples(self.sampling_rate)

    @property
    def chunk_samples(self) -> int:
        return self.chunk_length * self.sampling_rate

    @property
    def chunk_frames(self) -> int:
        """Spectra of a chunk."""
        return self.chunk_samples // self.hop_length

    def spec(self, num_chunks: int) -> TensorSpec:
        """Return the spec of ``num_chunks`` chunks: ``(chunks, mels, spectra)``."""
        return TensorSpec("float32", (num_chunks, self.feature_size, self.chunk_frames))

    def write(self, samples: Samples, out: NDArray[np.float32]) -> None:
        """Write the log-mel spectra of ``samples`` into ``out``, with the layout of `spec`.

        Missing samples are silence, additional ones are dropped. Every value is relative to the
        loudest of all chunks, as if they were one long one.
        """
        num_samples = len(out) * self.chunk_samples
        samples = samples[:num_samples]
        # All windows of pure silence are at the floor.
        num_heard = min(-(-(len(samples) + self.n_fft // 2) // self.hop_length), num_samples)
        out[:] = math.log10(_FLOOR)
        for number, chunk in enumerate(out):
            first = number * self.chunk_frames
            for start in range(0, self.chunk_frames, _BLOCK):
                stop = min(start + _BLOCK, self.chunk_frames, num_heard - first)
                if stop > start:
                    spectra = self._log_spectra(samples, first + start, first + stop, num_samples)
                    chunk[:, start:stop] = spectra.T
        _scale(out, out.max())

    def write_clip(self, samples: Samples, out: NDArray[np.float32], *, end: int) -> None:
        """Write the first spectra of ``samples`` into ``out``, ``(mels, spectra)``.

        Every value is relative to the loudest of all spectra.

        Args:
            end: Number of samples of the whole clip, in which silence follows ``samples``. More are
                dropped.
        """
        samples, count = samples[:end], out.shape[1]
        for start in range(0, count, _BLOCK):
            stop = min(start + _BLOCK, count)
            out[:, start:stop] = self._log_spectra(samples, start, stop, end).T
        loudest = out.max()
        num_heard = min(
            -(-(len(samples) + self.n_fft // 2) // self.hop_length), end // self.hop_length
        )
        if num_heard > count:  # more spectra hear the last samples
            loudest = max(loudest, self._log_spectra(samples, count, num_heard, end).max())
        _scale(out, loudest)

    def _log_spectra(self, samples: Samples, start: int, stop: int, end: int) -> Samples:
        """Return ``(stop - start, mels)``; each spectrum is of the samples around its position."""
        half = self.n_fft // 2
        begin = start * self.hop_length - half
        piece = _mirrored(samples, begin, (stop - 1) * self.hop_length - half + self.n_fft, end)
        windows = sliding_window_view(piece, self.n_fft)[:: self.hop_length]
        spectra = np.fft.rfft(windows * _window(self.n_fft))
        power = spectra.real**2 + spectra.imag**2
        mels = power @ _filters(self.feature_size, self.n_fft, self.sampling_rate)
        return np.log10(np.maximum(mels, np.float32(_FLOOR)))


def _scale(out: NDArray[np.float32], loudest: float) -> None:
    """Cut off what is much less than the loudest value, and scale, in place."""
    np.maximum(out, loudest - 8.0, out=out)
    out += 4.0
    out /= 4.0


def _mirrored(samples: Samples, start: int, stop: int, end: int) -> Samples:
    """Return samples ``[start, stop)`` of a clip of ``end`` samples, mirrored at its ends.

    ``samples`` is the begin of the clip; silence follows.
    """
    if start >= 0 and stop <= len(samples):
        return samples[start:stop]
    places = np.abs(np.arange(start, stop))
    places = np.where(places < end, places, 2 * (end - 1) - places)
    piece = np.zeros(stop - start, np.float32)
    heard = places < len(samples)
    piece[heard] = samples[places[heard]]
    return piece


@lru_cache(maxsize=4)
def _window(n_fft: int) -> Samples:
    """Return a periodic Hann window."""
    window = np.hanning(n_fft + 1)[:-1].astype(np.float32)
    window.flags.writeable = False
    return window


@lru_cache(maxsize=4)
def _filters(num_mels: int, n_fft: int, rate_hz: int) -> Samples:
    """Return ``(n_fft // 2 + 1, num_mels)``: triangles of equal area, even on Slaney's scale."""
    bins_hz = np.linspace(0, rate_hz // 2, 1 + n_fft // 2)
    highest = _LINEAR_MELS + math.log(_HIGHEST_HZ / _LINEAR_HZ) / _LOG_STEP
    corners_hz = _to_hz(np.linspace(0.0, highest, num_mels + 2))
    left, centre, right = corners_hz[:-2], corners_hz[1:-1], corners_hz[2:]
    rising = (bins_hz[:, None] - left) / (centre - left)
    falling = (right - bins_hz[:, None]) / (right - centre)
    triangles = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (right - left))
    filters = triangles.astype(np.float32)
    filters.flags.writeable = False
    return filters


def _to_hz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    linear = mels * (_LINEAR_HZ / _LINEAR_MELS)
    beyond = _LINEAR_HZ * np.exp(_LOG_STEP * (mels - _LINEAR_MELS))
    return np.where(mels < _LINEAR_MELS, linear, beyond)
