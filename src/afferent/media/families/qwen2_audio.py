"""Qwen2-Audio: the first 30 s of a clip, with embeddings in proportion to its length."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from afferent.errors import InvalidMedia
from afferent.media.decoded import Array, Media
from afferent.media.families.entry import EngineFacts, Entry
from afferent.media.families.family import processor_settings
from afferent.media.families.mel import LogMel
from afferent.media.families.plan import FeaturePlan
from afferent.media.families.whisper import (
    FEATURES,
    AudioTokenFamily,
    audio_header,
    decoded_audio,
)
from afferent.media.headers.probe import MediaHeader
from afferent.types import TensorSpec

_MASK: Final = "feature_attention_mask"
_AUDIO_TOKEN_ID: Final = 151_646  # default if the configuration omits it
_SPECTRA_A_ROW: Final = 2  # the encoder's second convolution has a step of two


class Qwen2AudioFamily(AudioTokenFamily, tag="qwen2_audio", frozen=True, kw_only=True):
    """Family of Qwen2-Audio: the encoder halves the spectra of a clip twice."""

    def plan(self, header: MediaHeader) -> FeaturePlan:
        num_samples = self.mel.num_samples(audio_header(header))
        rows = (self._num_spectra(num_samples) - 1) // _SPECTRA_A_ROW + 1
        num_embeds = (rows - 2) // 2 + 1
        if num_embeds < 1:
            raise InvalidMedia("the audio is too short for the model")
        specs = {
            FEATURES: self.mel.spec(1),
            _MASK: TensorSpec("int32", (1, self.mel.chunk_frames)),
        }
        return FeaturePlan(specs, (num_embeds,))

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        samples = decoded_audio(media, self.sample_rate_hz).samples
        self.mel.write(samples, out[FEATURES])
        out[_MASK][:] = 0
        out[_MASK][:, : self._num_spectra(len(samples))] = 1

    def _num_spectra(self, num_samples: int) -> int:
        """Return the number of spectra that begin within the clip, up to one chunk."""
        return -(-min(num_samples, self.mel.chunk_samples) // self.mel.hop_length)


def describe(folder: Path, config: Mapping[str, Any]) -> Qwen2AudioFamily | None:
    """Return the family of a model; ``None`` if its encoder needs other spectra.

    Raises:
        ConfigError: The folder does not define how audio is processed.
        UnsupportedModel: Its feature extractor is not supported here.
    """
    mel = LogMel.from_settings(processor_settings(folder, "feature_extractor"))
    encoder = config.get("audio_config") or {}
    spectra = 2 * encoder.get("max_source_positions", 1500), encoder.get("num_mel_bins", 128)
    if spectra != (mel.chunk_frames, mel.feature_size):
        return None
    token_id = config.get("audio_token_id", config.get("audio_token_index", _AUDIO_TOKEN_ID))
    return Qwen2AudioFamily(mel=mel, audio_token_id=token_id)


ENTRY: Final = Entry(
    model_types=("qwen2_audio",),
    describe=describe,
    engine=EngineFacts(compared_with={"vllm": ("qwen2_audio",)}),
)
