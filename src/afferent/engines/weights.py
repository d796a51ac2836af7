"""Weight files of a model, and their digest, which is a part of the keys of embeddings.

Only safetensors are read: the older format is a pickle, which may run code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from afferent import keys
from afferent.errors import ConfigError
from afferent.media.families.family import read_json

_TAG = b"afferent/weights/v1"
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EMBEDDING = ".embed_tokens.weight"
_OTHER_FORMS = ("pytorch_model.bin", "pytorch_model.bin.index.json")


class _Index(Struct):
    """Index of weights: the file of each tensor."""

    weight_map: dict[str, str]


def weights_files(folder: Path) -> list[Path]:
    """Return the files that are loaded; a folder may have the same weights in other formats too.

    Raises:
        ConfigError: The folder has no weights in a supported format.
    """
    if (whole := folder / _WHOLE).is_file():
        return [whole]
    if (index := folder / _INDEX).is_file():
        try:
            names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        except (ValueError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{index} can't be read: {error}") from error
        if foreign := sorted(name for name in names if not name or Path(name).name != name):
            raise ConfigError(f"{index} names {foreign[0]!r}, which is no file of its folder")
        return [folder / name for name in sorted(names)]
    if any((folder / other).is_file() for other in _OTHER_FORMS):
        raise ConfigError(
            f"{folder} has its weights in pytorch_model.bin, which is a pickle and may run code; "
            "save them as safetensors: model.save_pretrained(folder)"
        )
    raise ConfigError(f"{folder} has no weights: neither {_WHOLE} nor {_INDEX}")


def check_weights(folder: Path) -> None:
    """Read the headers of the weight files, and nothing else of them.

    Raises:
        ConfigError: The folder has no weights in a supported format, one of the files is broken, or
            they are of another model than its ``config.json``.
    """
    from safetensors import SafetensorError, safe_open  # readers of digests lack it

    found: list[tuple[int, ...]] = []
    for file in weights_files(folder):
        try:
            with safe_open(file, framework="numpy") as tensors:
                names = [name for name in tensors.keys() if name.endswith(_EMBEDDING)]  # noqa: SIM118
                found += [tuple(tensors.get_slice(name).get_shape()) for name in names]
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} can't be read: {error}") from error
    config = read_json(folder / "config.json")
    text = config.get("text_config", config)
    wanted = (text.get("vocab_size"), text.get("hidden_size")) if isinstance(text, dict) else ()
    if found and all(isinstance(n, int) for n in wanted) and wanted not in found:
        raise ConfigError(
            f"the weights in {folder} are of another model than its config.json: embeddings of "
            f"tokens are {' x '.join(map(str, found[0]))}, not {' x '.join(map(str, wanted))}"
        )


def weights_nbytes(folder: Path) -> int:
    """Return the stored size of the weights; 0 where there are none."""
    try:
        return sum(file.stat().st_size for file in weights_files(folder))
    except (ConfigError, OSError):  # the process that loads the model reports the error
        return 0


def weights_digest(folder: Path, files: Sequence[Path] = ()) -> bytes:
    """Return the digest of the files' bytes, regardless of their dates; a few GB/s.

    Args:
        folder: Folder of the model.
        files: Files that are loaded, if they are not those of `transformers`.

    Raises:
        ConfigError: The folder has no weights.
    """
    parts: list[bytes] = []
    for file in files or [folder / "config.json", *weights_files(folder)]:
        parts += [file.name.encode(), keys.digest_file(file)]
    return keys.frame(_TAG, *parts)
