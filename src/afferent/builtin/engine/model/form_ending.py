"""Short ends of answers that have a format: what closes their strings, lists and objects.

An answer that reaches the limit of its tokens in the middle of a string is no JSON. So an answer
with a format ends in time: while few tokens are left, the shortest end that is found quickly is
compared with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

MOST_TOKENS: Final = 48
"""Longest end that is looked for: each token costs a token mask."""
_NEAR: Final = 12
_CLOSING: Final = ('""', '"', "}", "]", "0", "null")
"""Texts that bring an end nearer, the best first. An empty string, else the end of a string: in a
string the mask allows brackets too, as characters.
"""


class FormEnding:
    """Finds ends for one tokenizer. Not safe for several threads."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer, self._ends = tokenizer, tuple(tokenizer.eos_tokens)

    def find(self, matcher: LLMatcher, num_left: int) -> list[int] | None:
        """Return tokens that complete an answer, without the one that ends it.

        The search is greedy: there may be a shorter end.

        Args:
            matcher: State of the answer; it is not changed.
            num_left: Tokens that the answer may have still, its end included.

        Returns:
            ``None`` if no end of fewer tokens was found.
        """
        ahead, tokens = matcher.deep_copy(), list[int]()
        while not ahead.is_accepting():
            if len(tokens) + 1 >= min(num_left, MOST_TOKENS):
                return None
            allowed = np.frombuffer(ahead.compute_bitmask(), np.uint8)
            token = self._nearest(allowed)
            if token is None or not ahead.consume_token(token):
                return None
            tokens.append(token)
        return tokens

    def bounded(
        self, matcher: LLMatcher, mask: NDArray[np.uint8], num_left: int
    ) -> tuple[NDArray[np.uint8], list[int] | None]:
        """Return the mask for an answer with few tokens left, and its end if it has to begin now.

        Shortly before, the mask excludes tokens after which an end would be longer, if others are
        allowed.
        """
        ending = self.find(matcher, num_left)
        if ending is None or len(ending) + _NEAR < num_left:
            return mask, None
        if len(ending) + 2 >= num_left:
            return mask, ending
        bounded = mask & ~_bits(self._lengthening, like=mask)
        return (bounded if bounded.any() else mask), None

    def only(self, token: int | None, mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return a mask like this one of one token, or of those that end an answer."""
        return _bits(list(self._ends) if token is None else [token], like=mask)

    def _nearest(self, allowed: NDArray[np.uint8]) -> int | None:
        """Return the allowed token that brings the end nearest."""
        for token in self._closing:
            if allowed[token >> 3] >> (token & 7) & 1:
                return token
        bits = np.unpackbits(allowed, bitorder="little")[: len(self._ranks)]
        best = int(np.argmax(np.where(bits, self._ranks, -1)))
        return best if bits[best] and self._ranks[best] >= 0 else None

    @cached_property
    def _closing(self) -> list[int]:
        found = [self._tokenizer.tokenize_str(text) for text in _CLOSING]
        return [tokens[0] for tokens in found if len(tokens) == 1]

    @cached_property
    def _texts(self) -> list[bytes]:
        return [
            self._tokenizer.decode_bytes([token]) for token in range(self._tokenizer.vocab_size)
        ]

    @cached_property
    def _lengthening(self) -> NDArray[np.intp]:
        """Tokens that open a list, an object or an escape, go on to another value, or are a part of
        a character.
        """
        return np.flatnonzero([_is_lengthening(text) for text in self._texts])

    @cached_property
    def _ranks(self) -> NDArray[np.int32]:
        """Rank of each token: longer texts are further, but none that opens a list or an object."""
        ranks = [0 if b"{" in text or b"[" in text else 1 + len(text) for text in self._texts]
        return np.array(ranks, np.int32)


def _is_lengthening(text: bytes) -> bool:
    is_part = text.decode(errors="ignore").encode() != text
    return is_part or any(character in text for character in b"{[,\\")


def _bits(
    tokens: Sequence[int] | NDArray[np.intp], *, like: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Return the mask of these tokens, as long as another one."""
    bits = np.zeros(8 * len(like), np.uint8)
    bits[tokens] = 1
    return np.packbits(bits, bitorder="little")
