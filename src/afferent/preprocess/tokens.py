"""The names that a model's tokenizer has for its tokens of media."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from afferent.preprocess.family import read_json


def named_tokens(folder: Path) -> Mapping[str, str]:
    """Texts of tokens, by what `transformers` calls them; none where the folder does not say.

    Raises:
        ConfigError: The tokenizer's file can't be read.
    """
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    extra = settings.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {}), **settings}
    return {name: value for name, value in named.items() if isinstance(value, str)}
