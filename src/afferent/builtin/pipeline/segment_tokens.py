"""Tokens of rendered prompts, segment by segment: a conversation costs what is new in it.

A tokenizer takes special tokens out of a text first, and then encodes what is between them. So the
tokens of a text are those of its segments, each of which begins with a special token, and a known
segment needs no tokenizer.
"""

from __future__ import annotations

import itertools
import re
import threading
from array import array
from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

_MOST_SEGMENTS: Final = 8_192
_MOST_CHARACTERS, _MOST_IN_ALL = 2_000, 1 << 20
"""Characters of one segment and of all; longer segments are not kept."""


class SegmentTokens:
    """Least-recently-used cache of segments, separate for each tenant; thread-safe.

    So the time of a prompt does not reveal another tenant's texts.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, str], array[int]] = {}
        self._num_characters = 0
        self._lock = threading.Lock()
        added = tokenizer.get_added_tokens_decoder().values()
        names = {
            token.content
            for token in added
            if token.special
            and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        }
        longest_first = sorted(filter(None, names), key=len, reverse=True)
        self._beginning = re.compile("|".join(map(re.escape, longest_first)))
        self._is_sound = bool(longest_first) and all(map(self._agrees, longest_first))

    def tokens(self, text: str, *, tenant: str) -> list[int]:
        """Return the tokens of a text.

        Raises:
            TypeError: It is no Unicode text, as from the tokenizer.
        """
        if not self._is_sound:
            return self._encode(text)
        token_ids: list[int] = []
        for segment in self._segments(text):
            token_ids += self._of_segment(segment, tenant)
        return token_ids

    def _of_segment(self, segment: str, tenant: str) -> Sequence[int]:
        if len(segment) > _MOST_CHARACTERS:
            return self._encode(segment)
        key = tenant, segment
        with self._lock:
            known = self._known.pop(key, None)
            if known is not None:
                self._known[key] = known  # the most recently used
                return known
        made = array("I", self._encode(segment))
        with self._lock:
            if key not in self._known:
                self._known[key] = made
                self._num_characters += len(segment)
            while len(self._known) > _MOST_SEGMENTS or self._num_characters > _MOST_IN_ALL:
                oldest = next(iter(self._known))
                del self._known[oldest]
                self._num_characters -= len(oldest[1])
        return made

    def _segments(self, text: str) -> list[str]:
        starts = [found.start() for found in self._beginning.finditer(text)]
        bounds = [0, *starts, len(text)]
        return [text[start:end] for start, end in itertools.pairwise(bounds) if end > start]

    def _agrees(self, name: str) -> bool:
        """Whether the segments around a special token have the tokens of the whole text."""
        text = f" one {name} two\n{name}{name}\n\nthree. {name}Four"
        return self._encode(text) == [
            token for segment in self._segments(text) for token in self._encode(segment)
        ]

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids
