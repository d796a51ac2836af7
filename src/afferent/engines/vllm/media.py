"""Selection of files whose features here equal vLLM's own; vLLM gets the others as bytes."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Final, Self

from msgspec import Struct

from afferent import keys
from afferent.engines.vllm.mp4 import decodes_alike
from afferent.engines.vllm_hash import image_hash
from afferent.errors import ConfigError
from afferent.media.families import mistral
from afferent.media.families.family import (
    MAX_SAMPLED_FRAMES,
    processor_settings,
    read_json,
)
from afferent.media.families.qwen_vl import QwenVlFamily
from afferent.media.families.registry import AnyFamily, describe, engine_facts
from afferent.media.headers.boxes import Buffer
from afferent.media.headers.header import is_read_as_rgb
from afferent.media.headers.image_sizes import is_deep_grey
from afferent.types import Modality

_PLAIN_WAVE: Final = frozenset({1, 3, 0xFFFE})
"""Formats of uncompressed samples: integers, floats, and the extensible format of either."""
_SAMPLED: Final = (2.0, None, 4, MAX_SAMPLED_FRAMES)
"""Frames per second, most frames, least frames, limit of frames: the rule of a vLLM for videos,
regardless of the model's folder.
"""


class TakenMedia(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Media that vLLM takes as features.

    Attributes:
        audio_rate_hz: Required rate of audio: vLLM resamples other rates by a rule of its own.
            0: audio is never taken.
        videos: Whether vLLM takes the same frames of a video as Afferent.
        video_files: Whether its model takes videos. If not, it gets their frames as images.
        any_file: Whether vLLM gets images of formats whose headers are unknown here.
    """

    audio_rate_hz: int = 0
    videos: bool = False
    video_files: bool = True
    any_file: bool = False

    @classmethod
    def of(cls, family: AnyFamily | None, folder: Path) -> Self:
        """Return the media that are taken for a model with this family, in this folder.

        Raises:
            ConfigError: The folder holds no model.
        """
        if family is None:
            return cls()
        model_type = type_of(folder)
        return cls(
            audio_rate_hz=family.sample_rate_hz,
            videos=isinstance(family, QwenVlFamily) and _samples_alike(folder),
            video_files=model_type not in engine_facts(model_type).without_videos.get("vllm", ()),
        )

    def takes(self, modality: Modality, file: Buffer | None) -> bool:
        """See `afferent.engines.upstream.Upstream`."""
        match modality:
            case Modality.IMAGE:
                return file is None or not is_deep_grey(file)  # Pillow cuts off at 255
            case Modality.AUDIO if file is not None:
                return 0 < self.audio_rate_hz == _lossless_rate_hz(bytes(file[:64]))
            case Modality.AUDIO:
                return self.audio_rate_hz > 0
            case Modality.VIDEO:
                return self.videos and (file is None or decodes_alike(file))


class ItemHashes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names of images as a stock vLLM computes them.

    Attributes:
        model: The model as that vLLM was told it.
        algorithm: Its hash algorithm.
    """

    model: str
    algorithm: keys.Algorithm

    def name_of(self, modality: Modality, file: Buffer) -> bytes:
        """Return the name of an item that vLLM gets as features; empty: it has that of its key.

        vLLM converts images that are not read as RGB; their pixels here need not be the same. Of
        some formats, only a decoder knows.
        """
        if modality is not Modality.IMAGE or not is_read_as_rgb(file):
            return b""
        return bytes.fromhex(image_hash(file, model=self.model, algorithm=self.algorithm))


def type_of(folder: Path) -> str:
    """Return the type of a model as vLLM reads its folder.

    Raises:
        ConfigError: The folder holds no model.
    """
    config = mistral.config_of(folder) or read_json(folder / "config.json")
    return str(config.get("model_type"))


def _samples_alike(folder: Path) -> bool:
    family = describe(folder)  # without the server's own limit, which is meant to be closer
    if not isinstance(family, QwenVlFamily) or family.video is None:
        return False
    own = family.video.settings
    sampled = (own.fps, own.num_frames, own.min_frames, own.max_frames)
    # Qwen3-VL scales frames to another size where the folder does not set the size.
    is_sized = own.generation != "qwen3" or _says_size(folder)
    return is_sized and sampled == _SAMPLED and not own.cap_pixels_per_frame


def _says_size(folder: Path) -> bool:
    try:
        return "size" in processor_settings(folder, "video_processor")
    except ConfigError:
        return False


def _lossless_rate_hz(head: bytes) -> int:
    """Return the rate of a WAV or FLAC file that every decoder reads alike; 0 for any other."""
    if head[:4] == b"RIFF" and head[8:16] == b"WAVEfmt " and len(head) >= 28:
        kind, _, rate_hz = struct.unpack_from("<HHI", head, 20)
        return int(rate_hz) if kind in _PLAIN_WAVE else 0
    if head[:4] == b"fLaC" and len(head) >= 21 and head[4] & 0x7F == 0:
        return int.from_bytes(head[18:21], "big") >> 4
    return 0
