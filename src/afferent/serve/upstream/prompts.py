"""What stands in a prompt for an item, in tokens, as the engine is told."""

from __future__ import annotations

import functools
from itertools import groupby
from pathlib import Path

from tokenizers import Tokenizer

from afferent.engine.references import Run
from afferent.errors import ConfigError
from afferent.preprocess.family import Family, MediaTokens
from afferent.preprocess.plan import Prompt
from afferent.types import Modality

_MAX_KNOWN = 4096


class PromptTokens:
    """The tokenizer of one model, for what a family writes around an item's rows."""

    def __init__(self, folder: Path, family: Family) -> None:
        """
        Raises:
            ConfigError: The folder has no ``tokenizer.json``.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(f"{folder} has no tokenizer.json; save the model's fast tokenizer")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokens = family.tokens
        self.runs = functools.lru_cache(_MAX_KNOWN)(self._runs)

    def of(self, modality: Modality) -> MediaTokens:
        return self._tokens[modality]

    def _runs(self, modality: Modality, prompt: Prompt) -> tuple[Run, ...]:
        tokens: list[Run] = []
        for piece in prompt:
            if isinstance(piece, int):
                tokens.append((self._tokens[modality].embed, piece))
            else:
                ids = self._tokenizer.encode(piece, add_special_tokens=False).ids
                tokens += [(token, 1) for token in ids]
        return tuple(
            (token, sum(number for _, number in group))
            for token, group in groupby(tokens, key=lambda run: run[0])
        )
