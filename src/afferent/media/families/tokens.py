"""Special tokens of a model: their ids in its configuration, and their names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from afferent.errors import ConfigError
from afferent.media.families.family import read_json, read_json_as
from afferent.media.families.plan import Prompt

SPECIAL_NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")
"""Names of `transformers` for tokens that are not of media."""
_OLDER: Final = ("vocab.json", "tokenizer.model", "vocab.txt")
"""Files of tokenizers that `transformers` converts."""


class _AddedToken(Struct):
    id: int
    content: str


class _Tokenizer(Struct):
    added_tokens: list[_AddedToken]


class _Content(Struct):
    content: str


class _Settings(Struct):
    added_tokens_decoder: dict[int, _Content] = {}
    auto_map: dict[str, Any] = {}


def added_tokens(folder: Path) -> dict[int, str]:
    """Return the texts of the tokens that a model adds to its vocabulary, by their ids.

    Of an older form without ``tokenizer.json``, the settings list them.

    Raises:
        ConfigError: The folder has no tokenizer, an invalid one, or one that is code of its own.
    """
    if has_older_form(folder):
        settings = read_json_as(folder / "tokenizer_config.json", _Settings)
        if settings.auto_map:
            raise ConfigError(f"{folder}: no code of a model's folder is run")
        return {number: token.content for number, token in settings.added_tokens_decoder.items()}
    tokenizer = read_json_as(folder / "tokenizer.json", _Tokenizer)
    return {token.id: token.content for token in tokenizer.added_tokens}


def has_older_form(folder: Path) -> bool:
    """Return whether a folder has a tokenizer only in a form that `transformers` converts."""
    is_new = (folder / "tokenizer.json").exists()
    return not is_new and any((folder / name).exists() for name in _OLDER)


def between_marks(folder: Path, begin_id: int, end_id: int, num_embeds: int) -> Prompt:
    """Return the prompt of an image of Gemma's models: its rows between two tokens and empty lines.

    Raises:
        ConfigError: The folder does not have these tokens.
    """
    texts = added_tokens(folder)
    try:
        return f"\n\n{texts[begin_id]}", num_embeds, f"{texts[end_id]}\n\n"
    except KeyError as error:
        raise ConfigError(f"{folder} has no token {error} to mark an image with") from None


def image_token_id(config: Mapping[str, Any], default: int) -> int:
    """Return the id of the token that an image's embeddings replace.

    Args:
        config: The model's ``config.json``, or `transformers`' form of it.
        default: Id of the model's type, if the configuration omits it.
    """
    given = (config.get(name) for name in ("image_token_id", "image_token_index"))
    return next((token_id for token_id in given if token_id is not None), default)


def named_tokens(folder: Path) -> Mapping[str, str]:
    """Return the texts of tokens by their names in `transformers`; empty without a file.

    Raises:
        ConfigError: The tokenizer's file can't be read.
    """
    settings = _tokenizer_settings(folder)
    extra = settings.get("extra_special_tokens")
    named = {**(extra if isinstance(extra, dict) else {}), **settings}
    return {name: value for name, value in named.items() if isinstance(value, str)}


def special_names(folder: Path) -> dict[str, str]:
    """Return the texts of `SPECIAL_NAMES`; empty if the tokenizer has no such token.

    Raises:
        ConfigError: The tokenizer's file can't be read.
    """
    settings = _tokenizer_settings(folder)
    names = {}
    for key in SPECIAL_NAMES:
        value = settings.get(key)
        names[key] = value.get("content", "") if isinstance(value, dict) else value or ""
    return names


def _tokenizer_settings(folder: Path) -> Mapping[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.exists() else {}
