"""Prompt tokens of an item, as they are reported to the engine."""

from __future__ import annotations

import functools
from itertools import groupby
from pathlib import Path

from afferent.engines.references import Run
from afferent.media.families.family import Family, MediaTokens
from afferent.media.families.plan import Prompt
from afferent.media.families.tokenizer import read_tokenizer
from afferent.types import Modality

_MAX_KNOWN = 4096


class PromptTokens:
    """Tokenizer of one model, for a family's text around an item's rows."""

    def __init__(self, folder: Path, family: Family) -> None:
        """Read the tokenizer.

        Raises:
            ConfigError: The folder has no ``tokenizer.json``, or an invalid one.
        """
        self._tokenizer = read_tokenizer(folder)
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
