"""Models with Whisper's encoder: Whisper itself, and Voxtral."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from afferent.errors import ConfigError, InternalError, InvalidMedia
from afferent.media.decoded import Array, DecodedAudio, Media
from afferent.media.families.entry import Entry
from afferent.media.families.family import NO_TOKEN, MediaTokens, processor_settings
from afferent.media.families.mel import LogMel
from afferent.media.families.plain import PlainFamily
from afferent.media.families.plan import FeaturePlan
from afferent.media.headers.probe import AudioHeader, MediaHeader
from afferent.types import Modality

FEATURES: Final = "input_features"


class SpectraFamily(PlainFamily, frozen=True, kw_only=True):
    """Family of models that take log-mel spectra of audio unchanged."""

    mel: LogMel

    @property
    def sample_rate_hz(self) -> int:
        return self.mel.sampling_rate

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        self.mel.write(decoded_audio(media, self.sample_rate_hz).samples, out[FEATURES])


class AudioTokenFamily(SpectraFamily, frozen=True, kw_only=True):
    """Family of models with audio tokens in the prompt."""

    audio_token_id: int

    @property
    def tokens(self) -> Mapping[Modality, MediaTokens]:
        """Audio token, which both marks the item and stands for an embedding."""
        tokens = MediaTokens(marker=self.audio_token_id, embed=self.audio_token_id)
        return {Modality.AUDIO: tokens}


class WhisperFamily(SpectraFamily, tag="whisper", frozen=True, kw_only=True):
    """Encoder of 30 s that the decoder attends to: the prompt contains nothing of it."""

    @property
    def tokens(self) -> Mapping[Modality, MediaTokens]:
        """Audio, without a token."""
        return {Modality.AUDIO: MediaTokens(marker=NO_TOKEN, embed=NO_TOKEN)}

    def plan(self, header: MediaHeader) -> FeaturePlan:
        """Return one chunk for a clip of any length.

        More is cut off, as by the model's own processor.
        """
        audio_header(header)
        return FeaturePlan({FEATURES: self.mel.spec(1)}, ())


class VoxtralFamily(AudioTokenFamily, tag="voxtral", frozen=True, kw_only=True):
    """Chunks of 30 s, the last one filled up with silence, each of equally many embeddings."""

    embeds_per_chunk: int

    def plan(self, header: MediaHeader) -> FeaturePlan:
        """Return as many chunks as the clip begins, at the model's rate."""
        num_samples = self.mel.num_samples(audio_header(header))
        num_chunks = max(1, -(-num_samples // self.mel.chunk_samples))
        specs = {FEATURES: self.mel.spec(num_chunks)}
        return FeaturePlan(specs, (num_chunks * self.embeds_per_chunk,))


def describe(folder: Path, config: Mapping[str, Any]) -> WhisperFamily | VoxtralFamily:
    """Return the family of an audio model.

    Args:
        config: The folder's ``config.json``.

    Raises:
        ConfigError: The folder does not define how audio is processed.
        UnsupportedModel: Its feature extractor is not supported here.
    """
    mel = LogMel.from_settings(processor_settings(folder, "feature_extractor"))
    if config["model_type"] == "whisper":
        return WhisperFamily(mel=mel)
    encoder = config.get("audio_config") or {}
    # The projector combines as many of the encoder's rows as its input is wider than one.
    rows, width = encoder.get("max_source_positions", 1500), encoder.get("hidden_size", 1280)
    embeds, rest = divmod(rows * width, encoder.get("intermediate_size", 5120))
    if rest or embeds < 1:
        raise ConfigError(f"the audio encoder in {folder} gives no whole number of embeddings")
    token = config.get("audio_token_id")
    if not isinstance(token, int):
        raise ConfigError(f"the model in {folder} names no audio token")
    return VoxtralFamily(mel=mel, audio_token_id=token, embeds_per_chunk=embeds)


def audio_header(header: MediaHeader) -> AudioHeader:
    """Return the header of an audio clip.

    Raises:
        InvalidMedia: It is another medium's.
    """
    if not isinstance(header, AudioHeader):
        raise InvalidMedia("the model takes audio only")
    return header


def decoded_audio(media: Media, rate_hz: int) -> DecodedAudio:
    """Return a decoded audio clip.

    Raises:
        InternalError: It is another medium, or at another rate.
    """
    if not isinstance(media, DecodedAudio) or media.sample_rate_hz != rate_hz:
        raise InternalError(f"an audio clip at {rate_hz} Hz was expected")
    return media


ENTRY: Final[Entry[WhisperFamily | VoxtralFamily]] = Entry(
    model_types=("whisper", "voxtral"), describe=describe
)
