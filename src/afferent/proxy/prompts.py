"""Prompt tokens of an item, as they are reported to the engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from afferent.engines.references import NUMBER_RUN, FeaturesReference, Of, Run
from afferent.media.families.family import Family, MediaTokens
from afferent.media.families.plan import NUMBER, Prompt
from afferent.media.families.registry import POSITION_FEATURES
from afferent.media.families.tokenizer import read_tokenizer
from afferent.types import ContentKey, Handle, Modality

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

    def reference(
        self,
        modality: Modality,
        tree: Mapping[str, Any],
        prompt: Prompt,
        *,
        key: ContentKey,
        handle: Handle,
        expires_s: float,
        of: Of,
        alias: bytes = b"",
    ) -> FeaturesReference:
        """Return the reference to an item.

        Args:
            tree: Its features, as they are in the block of ``handle``.
        """
        tokens = self._tokens[modality]
        return FeaturesReference(
            modality=modality,
            key=key,
            handle=handle,
            marker=tokens.marker,
            embed=tokens.embed,
            prompt=self.runs(modality, prompt),
            small=_small(tree),
            expires_s=expires_s,
            of=of,
            alias=alias,
        )

    def _runs(self, modality: Modality, prompt: Prompt) -> tuple[Run, ...]:
        tokens: list[Run] = []
        for piece in prompt:
            if isinstance(piece, int):
                tokens.append((self._tokens[modality].embed, piece))
                continue
            before, *texts = piece.split(NUMBER)
            tokens += self._single(before)
            for text in texts:
                tokens += [NUMBER_RUN, *self._single(text)]
        # A repeated token is one run; a number is a run of none.
        return tuple(
            (token, sum(number for _, number in group))
            for (token, _), group in groupby(tokens, key=lambda run: (run[0], run[1] > 0))
        )

    def _single(self, text: str) -> list[Run]:
        return [(token, 1) for token in self._tokenizer.encode(text, add_special_tokens=False).ids]


def _small(tree: Mapping[str, Any]) -> dict[str, list[int | float] | int | float]:
    """Return the position features of one item."""
    return {
        name: np.asarray(tree[name])[0].tolist()
        for name in POSITION_FEATURES
        if name in tree and len(tree[name]) == 1
    }
