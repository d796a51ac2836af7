"""Pixtral and Voxtral in Mistral's own format: images resized by OpenCV, and samples of audio."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert
from numpy.typing import NDArray

from afferent.errors import ConfigError, InvalidMedia
from afferent.media.decoded import Array, Media
from afferent.media.families.entry import EngineFacts, Entry
from afferent.media.families.family import MediaTokens, read_json, read_json_as
from afferent.media.families.images import ImageFamily, decoded_image, image_header
from afferent.media.families.plain import PlainFamily
from afferent.media.families.plan import FeaturePlan
from afferent.media.families.settings import CLIP_COLOURS
from afferent.media.families.whisper import audio_header, decoded_audio
from afferent.media.headers.probe import MediaHeader
from afferent.media.transforms.resize import ResizeRule
from afferent.types import Modality, NonNegative, Positive, TensorSpec

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

PIXTRAL, VOXTRAL = "mistral/pixtral", "mistral/voxtral"
"""Types of models in this format, beside those of ``config.json``."""
IN_VLLM: Final = ("pixtral", "voxtral")
"""Their types in vLLM."""
_CONFIG, _TEKKEN, _WEIGHTS = "params.json", "tekken.json", "consolidated*.safetensors"
_PIXELS, _SAMPLES = "images", "audio_arrays"
_IMAGE, _BREAK, _END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"
_AUDIO, _BEGIN = "[AUDIO]", "[BEGIN_AUDIO]"
_UNLISTED: Final = {_IMAGE: 10, _BREAK: 12, _END: 13}
"""Ids of the tokens in files that do not list them."""
_INSTRUCT: Final = "instruct"


class _Token(Struct):
    rank: NonNegative
    token_str: str


class _ImageSettings(Struct):
    image_patch_size: Positive
    max_image_size: Positive
    spatial_merge_size: Positive = 1


class _Spectra(Struct):
    hop_length: Positive


class _AudioSettings(Struct):
    sampling_rate: Positive
    frame_rate: Annotated[float, Meta(gt=0)]
    audio_encoding_config: _Spectra
    chunk_length_s: Annotated[float, Meta(gt=0)]
    transcription_format: str = _INSTRUCT


class _Tekken(Struct):
    """``tekken.json``, without its vocabulary. Sections of other media may be of any form."""

    special_tokens: list[Any] | None = None
    image: Any = None
    multimodal: Any = None
    audio: Any = None

    def ids(self, *texts: str) -> dict[str, int]:
        """Return the ids of tokens.

        Raises:
            KeyError: The file has no such token.
            ValidationError: It lists them in another form.
        """
        if self.special_tokens is None:
            return {text: _UNLISTED[text] for text in texts}
        dicts = (each for each in self.special_tokens if isinstance(each, dict))
        listed = [each for each in dicts if each.get("token_str") in texts]
        found = {each.token_str: each.rank for each in convert(listed, list[_Token])}
        return {text: found[text] for text in texts}


class MistralImages(ImageFamily, tag="mistral_images", frozen=True, kw_only=True):
    """Images in rows of ``side`` times ``side`` pixels to an embedding, no side above ``longest``.

    ``ids`` are those of the texts in its prompts. ``resizer`` names the library that resizes:
    OpenCV's results differ between its versions, and between kinds of processors, for which it has
    code of its own.
    """

    ids: dict[str, int]
    side: int
    longest: int
    resizer: str

    def tokenizer(self) -> Tokenizer:
        return _words(self.ids)

    def plan(self, header: MediaHeader) -> FeaturePlan:
        header = image_header(header)
        width, height = header.width, header.height
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            width, height = max(round(width / ratio), 1), max(round(height / ratio), 1)
        columns, rows = math.ceil(width / self.side), math.ceil(height / self.side)
        shape = (1, 3, rows * self.side, columns * self.side)
        prompt = (columns, _BREAK) * (rows - 1) + (columns, _END)
        return FeaturePlan({_PIXELS: TensorSpec("float32", shape)}, prompt)

    def resizing(self, rule: ResizeRule) -> MistralImages:
        return self

    def load(self) -> None:
        _opencv().setNumThreads(1)

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        (pixels,), cv2 = out[_PIXELS], _opencv()
        size = pixels.shape[2], pixels.shape[1]
        floats = decoded_image(media).pixels.astype(np.float32)
        resized = cv2.resize(floats, size, interpolation=cv2.INTER_CUBIC)
        resized /= np.float32(255)
        resized -= _colours("image_mean")
        resized /= _colours("image_std")
        np.copyto(pixels, resized.transpose(2, 0, 1))


class MistralAudio(PlainFamily, tag="mistral_audio", frozen=True, kw_only=True):
    """Samples of whole chunks; the model itself computes spectra.

    ``chunk`` is a number of samples, ``num_embeds`` the number of its embeddings.
    """

    ids: dict[str, int]
    rate_hz: int
    chunk: int
    num_embeds: int

    def tokenizer(self) -> Tokenizer:
        return _words(self.ids)

    @property
    def tokens(self) -> Mapping[Modality, MediaTokens]:
        return {Modality.AUDIO: MediaTokens(self.ids[_AUDIO], self.ids[_AUDIO])}

    @property
    def sample_rate_hz(self) -> int:
        return self.rate_hz

    def plan(self, header: MediaHeader) -> FeaturePlan:
        num_samples = audio_header(header).num_samples(self.rate_hz)
        if not num_samples:
            raise InvalidMedia("the audio is too short for the model")
        num_chunks = math.ceil(num_samples / self.chunk)
        specs = {_SAMPLES: TensorSpec("float32", (1, num_chunks * self.chunk))}
        return FeaturePlan(specs, (_BEGIN, num_chunks * self.num_embeds))

    def process(self, media: Media, out: Mapping[str, Array]) -> None:
        samples, (row,) = decoded_audio(media, self.rate_hz).samples, out[_SAMPLES]
        row[: len(samples)] = samples
        row[len(samples) :] = 0


def config_of(folder: Path) -> dict[str, Any] | None:
    """Return the configuration of a model in this format, with its type; ``None`` for others.

    vLLM by itself prefers this format in a folder with both. It then has another processor than
    that of `transformers`.

    Raises:
        ConfigError: A file can't be read.
    """
    if not has_format(folder):
        return None
    config = read_json(folder / _CONFIG) if (folder / _CONFIG).exists() else {}
    audio = config.get("multimodal")
    is_voxtral = isinstance(audio, dict) and "whisper_model_args" in audio
    model_type = VOXTRAL if is_voxtral else ""
    return {**config, "model_type": PIXTRAL if config.get("vision_encoder") else model_type}


def has_format(folder: Path) -> bool:
    """Return whether a folder is in this format, perhaps beside that of `transformers`."""
    return bool(weights(folder)) and has_settings(folder)


def has_settings(folder: Path) -> bool:
    """Return whether a folder has settings in this format, with or without weights."""
    return any((folder / name).exists() for name in (_CONFIG, _TEKKEN))


def weights(folder: Path) -> list[Path]:
    """Return the files of weights in this format."""
    return sorted(folder.glob(_WEIGHTS))


def digested_files(folder: Path) -> list[Path]:
    """Return the files that determine a model's encoder. vLLM fills gaps from ``config.json``."""
    configs = (folder / name for name in (_CONFIG, "config.json"))
    return [*(path for path in configs if path.exists()), *weights(folder)]


def describe(folder: Path, config: Mapping[str, Any]) -> MistralImages | MistralAudio | None:
    """Return the family of a model; ``None`` if its settings are not supported here."""
    try:
        tekken = read_json_as(folder / _TEKKEN, _Tekken)
        return _audio(tekken) if config["model_type"] == VOXTRAL else _images(tekken)
    except (ConfigError, ValidationError, KeyError):  # another tokenizer, or another form of it
        return None


def _images(tekken: _Tekken) -> MistralImages | None:
    settings = convert(tekken.image or tekken.multimodal, _ImageSettings)
    ids, resizer = tekken.ids(_IMAGE, _BREAK, _END), _resizer()
    if not resizer:
        return None
    return MistralImages(
        image=MediaTokens(ids[_IMAGE], ids[_IMAGE]),
        ids={text: ids[text] for text in (_BREAK, _END)},
        side=settings.image_patch_size * settings.spatial_merge_size,
        longest=settings.max_image_size,
        resizer=resizer,
    )


def _audio(tekken: _Tekken) -> MistralAudio | None:
    settings, ids = convert(tekken.audio, _AudioSettings), tekken.ids(_AUDIO, _BEGIN)
    samples = settings.chunk_length_s * settings.sampling_rate
    each = settings.sampling_rate / settings.frame_rate
    is_whole = samples % each == each % settings.audio_encoding_config.hop_length == 0
    if not is_whole or settings.transcription_format != _INSTRUCT:
        return None
    return MistralAudio(
        ids=ids,
        rate_hz=settings.sampling_rate,
        chunk=int(samples),
        num_embeds=int(samples // each),
    )


def _words(ids: dict[str, int]) -> Tokenizer:
    """Return a tokenizer of these texts and of no others."""
    from tokenizers import Tokenizer, models  # workers have no use for it

    return Tokenizer(models.WordLevel(ids, unk_token=next(iter(ids))))


def _resizer() -> str:
    """Return the name of the OpenCV that is installed; empty without one."""
    try:
        cv2 = _opencv()
    except ImportError:
        log.warning("images go to vLLM as bytes: install OpenCV with 'afferent-mm[mistral]'")
        return ""
    return f"{cv2.__version__}, {cv2.ipp.getIppVersion()}, {cv2.ipp.useIPP()}"


@functools.cache
def _opencv() -> Any:
    # Frontends import this module with a family, and lack the memory for the library.
    import cv2

    return cv2


@functools.cache
def _colours(name: str) -> NDArray[np.float32]:
    return np.array(CLIP_COLOURS[name], np.float32)


ENTRY: Final[Entry[MistralImages | MistralAudio]] = Entry(
    model_types=(PIXTRAL, VOXTRAL),
    describe=describe,
    engine=EngineFacts(
        compared_with={"vllm": (PIXTRAL, VOXTRAL)},
        without_videos={"vllm": (PIXTRAL,)},
    ),
)
