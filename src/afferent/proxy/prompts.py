"""Prompt tokens of an item, as they are reported to the engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from afferent.engines.references import NUMBER_RUN, FeaturesReference, Of, Run
from afferent.media.families.family import Family, MediaTokens, OwnTokenizer
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
        if isinstance(family, OwnTokenizer):
            self._tokenizer = family.tokenizer()
        else:
            self._tokenizer = read_tokenizer(folder)
        self._tokens = family.tokens
        self._has_own_tokenizer = isinstance(family, OwnTokenizer)
        self._markers = {kind: self._marker(tokens) for kind, tokens in family.tokens.items()}
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
            marker=self._markers[modality],
            embed=tokens.embed,
            prompt=self.runs(modality, prompt),
            small=_small(tree),
            expires_s=expires_s,
            of=of,
            alias=alias,
            has_own_tokenizer=self._has_own_tokenizer,
        )

    def _marker(self, tokens: MediaTokens) -> tuple[int, ...]:
        if not tokens.marker_text:
            return (tokens.marker,)
        return tuple(self._tokenizer.encode(tokens.marker_text, add_special_tokens=False).ids)

    def _runs(self, modality: Modality, prompt: Prompt) -> tuple[Run, ...]:
        runs: list[Run] = []

        def add(token: int, count: int) -> None:
            if runs and runs[-1][0] == token and runs[-1] != NUMBER_RUN:
                count += runs.pop()[1]
            if count:
                runs.append((token, count))

        for piece in prompt:
            if isinstance(piece, int):
                add(self._tokens[modality].embed, piece)
                continue
            for index, text in enumerate(piece.split(NUMBER)):
                if index:
                    runs.append(NUMBER_RUN)
                for token in self._tokenizer.encode(text, add_special_tokens=False).ids:
                    add(token, 1)
        return tuple(runs)


def _small(tree: Mapping[str, Any]) -> dict[str, list[int | float] | int | float]:
    """Return the position features of one item."""
    return {
        name: np.asarray(tree[name])[0].tolist()
        for name in POSITION_FEATURES
        if name in tree and len(tree[name]) == 1
    }
