"""Registry of families by model type, with the fingerprint of a family's features."""

from __future__ import annotations

import functools
import logging
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import msgspec

from afferent import keys
from afferent.errors import AfferentError, ConfigError, in_a_line
from afferent.media.families import outside
from afferent.media.families.adapter import AdapterFamily
from afferent.media.families.entry import EngineFacts, Entry
from afferent.media.families.family import MAX_SAMPLED_FRAMES, read_json
from afferent.media.families.native import ENTRIES, NativeFamily
from afferent.media.families.outside import OutsideFamily
from afferent.media.transforms import resize
from afferent.media.transforms.resize import ResizeRule
from afferent.types import Modality

log = logging.getLogger(__name__)

AnyFamily = NativeFamily | AdapterFamily
"""Features of a model, and their completion by its engine (``model_inputs``).

Plain data, which travels between processes.
"""

POSITION_FEATURES: Final = frozenset[str]().union(
    *(entry.engine.position_features for entry in ENTRIES)
)
"""Names of the features that determine positions, for all models."""

_BY_TYPE: Final[Mapping[str, Entry[NativeFamily]]] = {
    model_type: entry for entry in ENTRIES for model_type in entry.model_types
}

_SETTINGS = (
    *("config.json", "preprocessor_config.json", "processor_config.json"),
    *("video_preprocessor_config.json", "tokenizer_config.json"),
)
_IS_LOOKED_AT: Final = re.compile(
    "do_|.*size|.*edge|.*p(ixels|inpoints)|resample|.*seq_len|.*tiles|vision_(aspect|feature)"
).match
PREPROCESSING_VERSION: Final = 3
"""Version of the code that makes features of media.

It rises when a pixel, a sample or a model input changes, and only then:
`tests/media/test_golden_features.py` compares it with a corpus.
"""

DECODERS: Final = (
    *("pillow", "pillow-heif", "simplejpeg", "imagecodecs"),
    *("av", "soundfile", "soxr", "numpy"),
)
"""Libraries that decode and compute for every family."""
PROCESSORS: Final = ("torch", "torchvision", "transformers")
"""Libraries that are used only by a model's own processor or a plugin."""


def describe(
    folder: Path,
    config: Mapping[str, Any] | None = None,
    *,
    reference: bool = False,
    max_sampled_frames: int = MAX_SAMPLED_FRAMES,
    resize_rule: ResizeRule = "pillow",
) -> AnyFamily | None:
    """Return the family of the model in ``folder``, from its files alone.

    Args:
        folder: As `transformers` saves models.
        config: The configuration, if it is another than the folder's ``config.json``.
        reference: Let the model's own processor make the features of images, even if the family is
            known.
        max_sampled_frames: Most frames that are taken of a video, in addition to the folder's
            limit.
        resize_rule: Library whose results are reproduced; the model's own processor has its own.

    Returns:
        ``None`` if only the processor itself can determine it; see
        `afferent.media.workers.discover`.

    Raises:
        ConfigError: The folder contains no model, or one without settings for its processor.
    """
    config = read_json(folder / "config.json") if config is None else config
    entry = _entry(_type_of(folder, config))
    if entry is None:
        return None
    native = _described(entry, folder, config)
    if native is None:
        log.warning(
            "a family declines a model: its settings are among these, and ask for what the family "
            "does not do; the model's own processor, or the engine, takes over",
            extra={
                "model_type": config["model_type"],
                "family": entry.describe.__module__,
                **_settings_in(folder),
            },
        )
        return None
    try:
        native = native.sampling(max_sampled_frames).resizing(resize_rule)
    except AfferentError:
        raise
    except Exception as error:
        if not isinstance(native, OutsideFamily):
            raise
        raise outside.failed(native.cls, native.version, error) from error
    if reference and native.processor_layout is not None:
        tokens = native.tokens[Modality.IMAGE]
        return AdapterFamily(folder=str(folder), image=tokens, native=native)
    return native


def _settings_in(folder: Path) -> dict[str, object]:
    """Return the settings of a model's processor that families read, as in its files."""
    found: dict[str, object] = {}
    for name in _SETTINGS[:4]:
        if (folder / name).exists():
            given, file = read_json(folder / name), name.removesuffix(".json")
            found |= {f"{file}.{key}": given[key] for key in sorted(given) if _IS_LOOKED_AT(key)}
    return found


def engine_facts(model_type: str) -> EngineFacts:
    """Return the engine's facts of a model type; empty for an unknown one.

    Raises:
        ConfigError: The plugin family for it can't be loaded.
    """
    entry = _entry(model_type)
    return EngineFacts() if entry is None else entry.engine


def facts_of(folder: Path, config: Mapping[str, Any] | None = None) -> EngineFacts:
    """Return the engine's facts of the model in a folder.

    Args:
        config: As for `describe`.
    """
    config = read_json(folder / "config.json") if config is None else config
    return engine_facts(_type_of(folder, config))


@functools.cache
def _entry(model_type: str) -> Entry[NativeFamily] | Entry[OutsideFamily] | None:
    """Return the spec of a model type; search plugins, which takes 10 ms, only if necessary."""
    return _BY_TYPE.get(model_type) or outside.find(model_type)


def _type_of(folder: Path, config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError(f"{folder}/config.json names no model_type: it is no transformers model")
    return model_type


def _described(
    entry: Entry[NativeFamily] | Entry[OutsideFamily], folder: Path, config: Mapping[str, Any]
) -> NativeFamily | None:
    """Return the family; settings may be of any type and value, and a family may be a plugin."""
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
    """Return the digest of all that determines features besides the media (`docs/adr/0040`).

    Its parts:

    - the family, and the settings in the model's folder
    - `PREPROCESSING_VERSION`
    - the versions of the libraries that take part for this family
    - the kind of machine: sums of floats, and FFmpeg's conversion of colours, differ between them
    """
    files = [folder / name for name in _SETTINGS]
    contents = [path.read_bytes() if path.exists() else b"" for path in files]
    libraries = " ".join(f"{name}={version_of(name)}" for name in _libraries(family))
    code = f"{PREPROCESSING_VERSION} {platform.machine()} {libraries}"
    encoded = msgspec.msgpack.encode(family.without_paths())
    return keys.frame(b"afferent/processor/v3", encoded, *contents, code.encode())


def runs_foreign_code(family: AnyFamily) -> bool:
    """Return whether a model's own processor or a plugin makes the features."""
    return isinstance(family, AdapterFamily | OutsideFamily)


def _libraries(family: AnyFamily) -> tuple[str, ...]:
    if runs_foreign_code(family):
        return DECODERS + PROCESSORS
    # Torch resizes to the same bytes as the compiled part, in the version that the tests ran with.
    return (*DECODERS, "torch") if resize.needs_torch(family) else DECODERS


def version_of(library: str) -> str:
    """Return the installed version of a library; empty if it is not installed."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""
