"""The files of a model's weights, and their digest: embeddings of other weights are others."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from afferent import keys
from afferent.errors import ConfigError
from afferent.preprocess.family import read_json

_TAG = b"afferent/weights/v1"
_FORMS = ("model.safetensors", "pytorch_model.bin")
"""In the order in which `transformers` looks for them, each in one file or by an index of many."""


def weights_files(folder: Path) -> list[Path]:
    """Those that are loaded; a folder may have the same weights in other forms besides.

    Raises:
        ConfigError: The folder has no weights.
    """
    for form in _FORMS:
        if (whole := folder / form).is_file():
            return [whole]
        if (index := folder / f"{form}.index.json").is_file():
            names = set(read_json(index)["weight_map"].values())
            return [folder / name for name in sorted(names)]
    raise ConfigError(f"{folder} has no weights")


def weights_nbytes(folder: Path) -> int:
    """What they take, as they are stored; 0 where there are none."""
    try:
        return sum(file.stat().st_size for file in weights_files(folder))
    except (ConfigError, OSError):  # who loads the model says what is wrong with it
        return 0


def weights_digest(folder: Path) -> bytes:
    """Of the files' bytes, whatever their dates; a few GB/s.

    Raises:
        ConfigError: The folder has no weights.
    """
    parts: list[bytes] = []
    for file in [folder / "config.json", *weights_files(folder)]:
        hasher = blake3(max_threads=blake3.AUTO)
        hasher.update_mmap(file)
        parts += [file.name.encode(), hasher.digest()]
    return keys.frame(_TAG, *parts)
