"""Every model family that is known, and the way from a model's folder to its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from afferent import keys
from afferent.errors import InternalError
from afferent.ingest.probe import MediaHeader
from afferent.preprocess import resize
from afferent.preprocess.families import gemma3, internvl, llava, qwen_vl, whisper
from afferent.preprocess.families.adapter import AdapterFamily
from afferent.preprocess.families.fixed import FixedFamily
from afferent.preprocess.families.internvl import TiledFamily
from afferent.preprocess.families.qwen_vl import MAX_SAMPLED_FRAMES, QwenVlFamily
from afferent.preprocess.families.whisper import VoxtralFamily, WhisperFamily
from afferent.preprocess.family import read_json
from afferent.preprocess.plan import FeaturePlan

_Native = QwenVlFamily | FixedFamily | TiledFamily | WhisperFamily | VoxtralFamily

AnyFamily = _Native | AdapterFamily
"""What travels between processes."""

_Describe = Callable[[Path, Mapping[str, Any]], _Native | None]

_NATIVE: Mapping[str, _Describe] = {
    "llava": llava.describe,
    "gemma3": gemma3.describe,
    "internvl": internvl.describe,
    "whisper": whisper.describe_audio,
    "voxtral": whisper.describe_audio,
}

_SETTINGS = (
    *("config.json", "preprocessor_config.json", "processor_config.json"),
    *("video_preprocessor_config.json", "tokenizer_config.json"),
)
_LIBRARIES = (
    *("pillow", "numpy", "torch", "torchvision", "transformers", "simplejpeg", "imagecodecs"),
    *("av", "soundfile", "soxr"),
)


def describe(
    folder: Path, *, reference: bool = False, max_sampled_frames: int = MAX_SAMPLED_FRAMES
) -> AnyFamily | None:
    """The family of the model in ``folder``, from its files alone.

    Args:
        folder: As `transformers` saves models.
        reference: Let the model's own processor make the features of pictures, even if the family
            is known.
        max_sampled_frames: Most frames that are taken of a video, whatever the folder says.

    Returns:
        ``None`` if only the processor itself can tell; see `afferent.preprocess.measure`.

    Raises:
        ConfigError: The folder holds no model, or one without settings for its processor.
    """
    config = read_json(folder / "config.json")
    model_type = str(config.get("model_type"))
    if model_type in qwen_vl.GENERATIONS:
        native: _Native | None = qwen_vl.describe(
            folder, config, max_sampled_frames=max_sampled_frames
        )
    else:
        native = _NATIVE[model_type](folder, config) if model_type in _NATIVE else None
    if reference and isinstance(native, QwenVlFamily | FixedFamily):
        return AdapterFamily(folder=str(folder), image=native.image, native=native)
    return native


def preload(family: AnyFamily) -> None:
    """Load what `process` will need, so that a zygote's forks have it. Imports torch."""
    if isinstance(family, AdapterFamily):
        family.reference()
    else:
        resize.load()


def plan_for_sure(family: AnyFamily, header: MediaHeader) -> FeaturePlan:
    """`Family.plan`; where only the model's own processor knows, by asking it. Workers only."""
    plan = family.plan(header)
    if plan is None and isinstance(family, AdapterFamily):
        return family.reference().plan(header)
    if plan is None:
        raise InternalError("a family without a processor has no plan")
    return plan


def fingerprint(folder: Path, family: AnyFamily) -> bytes:
    """Digest of all that shapes features besides the media: family, settings, libraries."""
    if isinstance(family, AdapterFamily):  # the same model elsewhere gives the same features
        family = msgspec.structs.replace(family, folder="")
    files = [folder / name for name in _SETTINGS]
    contents = [path.read_bytes() if path.exists() else b"" for path in files]
    versions = [_version(name).encode() for name in _LIBRARIES]
    encoded = msgspec.msgpack.encode(family)
    return keys.frame(b"afferent/processor/v2", encoded, *contents, *versions)


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""
