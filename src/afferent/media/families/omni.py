"""Qwen2.5-Omni and Qwen3-Omni: images as in Qwen-VL, and audio in proportion to its length.

Their videos are not supported here: the whole processor has settings of its own for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from afferent.errors import InvalidMedia
from afferent.media.decoded import Array, DecodedAudio, Media
from afferent.media.families.entry import EngineFacts, Entry
from afferent.media.families.family import MediaTokens, processor_settings
from afferent.media.families.mel import LogMel
from afferent.media.families.plan import FeaturePlan
from afferent.media.families.qwen_vl import PROCESSORS, QwenVlFamily, described_cut
from afferent.media.families.tokens import image_token_id
from afferent.media.families.whisper import FEATURES, decoded_audio
from afferent.media.headers.probe import AudioHeader, MediaHeader
from afferent.types import Modality, TensorSpec

_LENGTHS: Final = "audio_feature_lengths"
_MASK: Final = "feature_attention_mask"
_WINDOW, _ROWS = 100, 13
"""Spectra of a window of Qwen3-Omni's encoder, and the embeddings that it makes of them."""
# Defaults of values that the configuration omits:
_IMAGE_TOKEN_ID, _AUDIO_TOKEN_ID = 151_655, 151_646


class OmniFamily(QwenVlFamily, tag="omni", frozen=True, kw_only=True):
    """Family of Qwen's models for images and audio.

    A short clip for Qwen2.5-Omni is filled up with silence to the processor's length. A long one is
    not, and a clip for Qwen3-Omni is filled up to a whole spectrum only: the last spectra then
    contain its end mirrored.
    """

    mel: LogMel
    audio: MediaTokens
    encoder: Literal["qwen2_5", "qwen3"]

    @property
    def tokens(self) -> Mapping[Modality, MediaTokens]:
        return {Modality.IMAGE: self.image, Modality.AUDIO: self.audio}

    @property
    def sample_rate_hz(self) -> int:
        return self.mel.sampling_rate

    def plan(self, header: MediaHeader) -> FeaturePlan:
        if not isinstance(header, AudioHeader):
            return super().plan(header)
        count = self._num_spectra(self.mel.num_samples(header))
        num_embeds = self._num_embeds(count)
        filled = count * self.mel.hop_length
        cant_be_mirrored = self.encoder == "qwen3" and filled <= self.mel.n_fft // 2
        if num_embeds < 1 or cant_be_mirrored:
            raise InvalidMedia("the audio is too short for the model")
        specs = {
            FEATURES: TensorSpec("float32", (1, self.mel.feature_size, count)),
            _LENGTHS: TensorSpec("int64", (1,)),
        }
        return FeaturePlan(specs, (num_embeds,))

    def _num_spectra(self, count: int) -> int:
        """Return the number of spectra of a clip of this many samples."""
        if self.encoder == "qwen2_5" and count > self.mel.chunk_samples:
            return count // self.mel.hop_length
        return -(-count // self.mel.hop_length)

    def _num_embeds(self, count: int) -> int:
        """Return the number of embeddings of this many spectra."""
        if self.encoder == "qwen2_5":
            return ((count - 1) // 2 + 1 - 2) // 2 + 1
        windows, rest = divmod(count, _WINDOW)
        for _ in range(3):  # each of three convolutions has a step of two
            rest = (rest + 1) // 2
        return windows * _ROWS + rest

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        if not isinstance(media, DecodedAudio):
            super().process(media, out)
            return
        samples = decoded_audio(media, self.sample_rate_hz).samples
        count = self._num_spectra(len(samples))
        is_third = self.encoder == "qwen3"
        filled = count * self.mel.hop_length if is_third else self.mel.chunk_samples
        end = max(filled, len(samples))
        self.mel.write_clip(samples, out[FEATURES][0], end=end)
        out[_LENGTHS][0] = count

    def model_inputs(self, features: Mapping[str, Any]) -> dict[str, Any]:
        inputs = super().model_inputs(features)
        if FEATURES in inputs:
            lengths = inputs[_LENGTHS]
            inputs[_MASK] = lengths.new_ones((1, inputs[FEATURES].shape[-1])).int()
        return inputs


def describe(folder: Path, config: Mapping[str, Any]) -> OmniFamily | None:
    """Return the family of a model; ``None`` if its settings are not supported here.

    Raises:
        ConfigError: The folder does not define how its media are processed.
        UnsupportedModel: Its feature extractor is not supported here.
    """
    cut = described_cut(folder, PROCESSORS)
    thinker = config.get("thinker_config") or {}
    encoder = thinker.get("audio_config") or {}
    mel = LogMel.from_settings(processor_settings(folder, "feature_extractor"))
    is_third = config["model_type"] == "qwen3_omni_moe"
    if cut is None or encoder.get("num_mel_bins", 128) != mel.feature_size:
        return None
    if is_third and 2 * encoder.get("n_window", _WINDOW // 2) != _WINDOW:
        return None
    audio_id = thinker.get("audio_token_id", thinker.get("audio_token_index", _AUDIO_TOKEN_ID))
    image_id = image_token_id(thinker, _IMAGE_TOKEN_ID)
    return OmniFamily(
        generation="qwen3" if is_third else "qwen2_5",
        image=MediaTokens(image_id, image_id),
        **cut,
        mel=mel,
        audio=MediaTokens(audio_id, audio_id),
        encoder="qwen3" if is_third else "qwen2_5",
    )


def _inputs_of_vllm(family: OmniFamily, inputs: Mapping[str, Any]) -> dict[str, Any]:
    if FEATURES not in inputs:
        return dict(inputs)
    (mask,) = inputs[_MASK].cpu()
    if family.encoder == "qwen2_5":
        padded = mask.new_zeros(max(len(mask), family.mel.chunk_frames))
        padded[: len(mask)] = mask
        mask = padded
    else:
        mask = mask.float()
    (spectra,) = inputs[FEATURES]
    return {"input_audio_features": spectra, _MASK: mask[None], _LENGTHS: inputs[_LENGTHS]}


_TYPES = ("qwen2_5_omni", "qwen3_omni_moe")
ENTRY = Entry(
    model_types=_TYPES,
    describe=describe,
    engine=EngineFacts(
        position_features=frozenset({"image_grid_thw", _LENGTHS}),
        compared_with={"vllm": _TYPES},
        encoder_inputs={"vllm": _inputs_of_vllm},
    ),
)
