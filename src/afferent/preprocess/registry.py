"""What is known of models by their type, the way from a folder to its family, and what tells two
families apart.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import msgspec

from afferent import keys
from afferent.errors import AfferentError, ConfigError, in_a_line
from afferent.preprocess.entry import EngineFacts, Entry
from afferent.preprocess.families import outside
from afferent.preprocess.families.adapter import AdapterFamily
from afferent.preprocess.families.native import ENTRIES, NativeFamily
from afferent.preprocess.families.outside import OutsideFamily
from afferent.preprocess.family import MAX_SAMPLED_FRAMES, read_json
from afferent.preprocess.resize import ResizeRule
from afferent.types import Modality

AnyFamily = NativeFamily | AdapterFamily
"""What features are made for a model, and how its engine finishes them (``model_inputs``); plain
data, which travels between processes.
"""

POSITION_FEATURES: Final = frozenset[str]().union(
    *(entry.engine.position_features for entry in ENTRIES)
)
"""Names of the features that positions are made from, whatever the model."""

_BY_TYPE: Final[Mapping[str, Entry[NativeFamily]]] = {
    model_type: entry for entry in ENTRIES for model_type in entry.model_types
}

_SETTINGS = (
    *("config.json", "preprocessor_config.json", "processor_config.json"),
    *("video_preprocessor_config.json", "tokenizer_config.json"),
)
_LIBRARIES = (
    *("pillow", "numpy", "torch", "torchvision", "transformers", "simplejpeg"),
    *("imagecodecs", "kornia-rs"),
    *("av", "soundfile", "soxr"),
)


def describe(
    folder: Path,
    *,
    reference: bool = False,
    max_sampled_frames: int = MAX_SAMPLED_FRAMES,
    resize_rule: ResizeRule = "pillow",
) -> AnyFamily | None:
    """The family of the model in ``folder``, from its files alone.

    Args:
        folder: As `transformers` saves models.
        reference: Let the model's own processor make the features of images, even if the family
            is known.
        max_sampled_frames: Most frames that are taken of a video, whatever the folder says.
        resize_rule: Whose results are meant; the model's own processor has its own.

    Returns:
        ``None`` if only the processor itself can tell; see `afferent.preprocess.discover`.

    Raises:
        ConfigError: The folder holds no model, or one without settings for its processor.
    """
    config = read_json(folder / "config.json")
    entry = _entry(_type_of(folder, config))
    native = None if entry is None else _described(entry, folder, config)
    if native is None:
        return None
    native = native.sampling(max_sampled_frames).resizing(resize_rule)
    if reference and native.processor_layout is not None:
        tokens = native.tokens[Modality.IMAGE]
        return AdapterFamily(folder=str(folder), image=tokens, native=native)
    return native


def engine_facts(model_type: str) -> EngineFacts:
    """What an engine has to know of the models of a type; nothing, of one that is not known.

    Raises:
        ConfigError: Another package's family for it can't be loaded.
    """
    entry = _entry(model_type)
    return EngineFacts() if entry is None else entry.engine


def facts_of(folder: Path) -> EngineFacts:
    """The same, of the model in a folder."""
    return engine_facts(_type_of(folder, read_json(folder / "config.json")))


@functools.cache
def _entry(model_type: str) -> Entry[NativeFamily] | Entry[OutsideFamily] | None:
    """Other packages are not looked at where the family is one of ours: it takes 10 ms."""
    return _BY_TYPE.get(model_type) or outside.find(model_type)


def _type_of(folder: Path, config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{folder}/config.json names no model_type: it is no transformers model")
    return model_type


def _described(
    entry: Entry[NativeFamily] | Entry[OutsideFamily], folder: Path, config: Mapping[str, Any]
) -> NativeFamily | None:
    """Settings may be of any type and value, and a family may be of another package."""
    try:
        encoded = msgspec.msgpack.encode(entry.describe(folder, config))
        family: NativeFamily | None = msgspec.msgpack.decode(encoded, type=NativeFamily | None)
    except AfferentError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the settings in {folder} make no sense ({entry.model_types[0]}): {in_a_line(error)}"
        ) from error
    return family


def fingerprint(folder: Path, family: AnyFamily) -> bytes:
    """Digest of all that shapes features besides the media: family, settings, libraries."""
    files = [folder / name for name in _SETTINGS]
    contents = [path.read_bytes() if path.exists() else b"" for path in files]
    versions = [_version(name).encode() for name in _LIBRARIES]
    encoded = msgspec.msgpack.encode(family.without_paths())
    return keys.frame(b"afferent/processor/v2", encoded, *contents, *versions)


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""
