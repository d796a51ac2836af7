"""What stands in a prompt for an item, in tokens, as the engine is told."""

from __future__ import annotations

import functools
from itertools import groupby
from pathlib import Path

from afferent.engine.references import Run
from afferent.preprocess.family import Family, MediaTokens
from afferent.preprocess.plan import Prompt
from afferent.serve.flow.tokenizer import read_tokenizer
from afferent.types import Modality

_MAX_KNOWN = 4096


class PromptTokens:
    """The tokenizer of one model, for what a family writes around an item's rows."""

    def __init__(self, folder: Path, family: Family) -> None:
        """
        Raises:
            ConfigError: The folder has no ``tokenizer.json``, or a broken one.
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
