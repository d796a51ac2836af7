"""The digest of a model's weights: embeddings of other weights are other embeddings."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from afferent import keys
from afferent.errors import ConfigError

_TAG = b"afferent/weights/v1"
_PATTERNS = ("config.json", "*.safetensors", "*.bin")


def weights_digest(folder: Path) -> bytes:
    """Of the files' bytes, whatever their dates; a few GB/s.

    Raises:
        ConfigError: The folder has no weights.
    """
    files = sorted({file for pattern in _PATTERNS for file in folder.glob(pattern)})
    if not any(file.suffix != ".json" for file in files):
        raise ConfigError(f"{folder} has no weights")
    parts: list[bytes] = []
    for file in files:
        hasher = blake3(max_threads=blake3.AUTO)
        hasher.update_mmap(file)
        parts += [file.name.encode(), hasher.digest()]
    return keys.frame(_TAG, *parts)
