"""Tokenizer in a model's folder."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from afferent.errors import ConfigError


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer.

    Raises:
        ConfigError: The folder has no ``tokenizer.json``, or an invalid one.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"{folder} has no tokenizer.json; save the model's fast tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"{path} can't be read: {error}".splitlines()[0]) from error
