"""Token masks for answers with a response format, computed in a thread beside the model.

A matcher takes the chosen tokens of an answer one after another: an answer that begins again is
followed again from its first token.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from afferent.builtin.engine.asked_form import Form
from afferent.builtin.engine.form.grammar import (
    compile_form,
    optional_call,
    tokenizer_of,
    too_much,
)
from afferent.builtin.engine.model.form_ending import MOST_TOKENS, FormEnding
from afferent.errors import AfferentError, ConfigError, InternalError
from afferent.types import Failure, MiB

log = logging.getLogger(__name__)

TokenMask = NDArray[np.uint8]
"""Bits of the tokens that may be chosen; the first is in the lowest bit of the first byte."""

_TIMEOUT_S: Final = 10.0
_MAX_KNOWN: Final = 64
_MAX_KNOWN_NBYTES: Final = 64 * MiB


@dataclass(slots=True, eq=False)
class _Followed:
    """Followed answer; only the thread uses the matcher.

    Attributes:
        num_left: Tokens that it may have still; 0: it has no limit, or is not to end by itself.
        mask: ``None`` until it is computed.
        ending: The rest of its tokens, once it has to end.
        optional: See `Wanted.optional`.
    """

    form: Form
    num_left: int = 0
    matcher: LLMatcher | None = None
    mask: TokenMask | None = None
    error: AfferentError | None = None
    ending: list[int] | None = None
    optional: int | None = None


class FormGuide:
    """Follows answers by the ids of their sequences; all calls are from one thread.

    Invariants:
        - Only the thread ``forms`` uses matchers, in the order of the calls.
        - `masks` waits for all earlier calls, up to its timeout.
        - A sequence without a mask can't continue, and gets a failure.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer, self._ends = tokenizer, frozenset(tokenizer.eos_tokens)
        self._followed: dict[str, _Followed] = {}
        self._known = _KnownForms(tokenizer)
        self._endings = FormEnding(tokenizer)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forms")
        self._last: Future[None] | None = None

    @classmethod
    def of(cls, folder: Path, *, eos_token_ids: Sequence[int], vocab_size: int) -> Self | None:
        """Return a guide; ``None``: this model supports no response formats."""
        try:
            tokenizer = tokenizer_of(folder, eos_token_ids=eos_token_ids, vocab_size=vocab_size)
        except ConfigError as error:
            log.warning("no answers of a given form", extra={"reason": error.message})
            return None
        return cls(tokenizer)

    def begin(
        self,
        sequence_id: str,
        form: Form,
        *,
        nbytes: int,
        answered: Sequence[int],
        max_tokens: int = 0,
    ) -> None:
        """Follow an answer from now on.

        Args:
            nbytes: Memory that its format takes.
            answered: Its tokens so far.
            max_tokens: Limit of all its tokens: before it, its strings, lists and objects are
                closed, if a short end is found. 0: they are not.
        """
        followed = self._followed[sequence_id] = _Followed(form, max_tokens)
        tokens = list(answered)
        self._last = self._thread.submit(self._begin, followed, nbytes, tokens)

    def advance(self, chosen: Sequence[tuple[str, int]]) -> None:
        """Add chosen tokens, one for a sequence; sequences without a format are ignored."""
        steps = []
        for sequence_id, token in chosen:
            followed = self._followed.get(sequence_id)
            # After the end of an answer no mask is needed.
            if followed is not None and token not in self._ends:
                followed.mask = None
                steps.append((followed, token))
        if steps:
            self._last = self._thread.submit(self._advance, steps)

    def masks(
        self, sequence_ids: Sequence[str]
    ) -> tuple[list[TokenMask | None], dict[str, Failure]]:
        """Return the token mask of each sequence, ``None`` without a format; and failures."""
        followed = [self._followed.get(sequence_id) for sequence_id in sequence_ids]
        if any(followed):
            self._wait()
        failed = {}
        for sequence_id, each in zip(sequence_ids, followed, strict=True):
            if each is not None and each.mask is None:
                error = each.error or too_much(each.form, "time")
                failed[sequence_id] = Failure(error.code, error.message)
        return [None if each is None else each.mask for each in followed], failed

    def optional(self, sequence_id: str) -> int | None:
        """Return `Wanted.optional` of a sequence, after `masks`."""
        followed = self._followed.get(sequence_id)
        return followed.optional if followed is not None else None

    def drop(self, sequence_id: str) -> None:
        """Forget a sequence; unknown ones are ignored."""
        self._followed.pop(sequence_id, None)

    def _wait(self) -> None:
        """Wait until the thread has done all its work, up to the timeout of a step."""
        if self._last is not None:
            try:
                self._last.result(_TIMEOUT_S)
            except TimeoutError:
                log.error("forms of answers take too long to follow")  # noqa: TRY400

    # In the thread

    def _begin(self, followed: _Followed, nbytes: int, answered: list[int]) -> None:
        try:
            followed.matcher = self._known.matcher(followed.form, nbytes)
            self._look(followed, answered)
            mark = "" if answered else optional_call(followed.form)
            tokens = self._tokenizer.tokenize_str(mark, parse_special=True)
            followed.optional = tokens[0] if len(tokens) == 1 else None
        except AfferentError as error:
            followed.error = error
        except Exception:
            log.exception("the form of an answer failed")
            followed.error = InternalError("the form of an answer failed")

    def _advance(self, steps: list[tuple[_Followed, int]]) -> None:
        for followed, token in steps:
            followed.mask = followed.optional = None
            if followed.error is None:
                self._look(followed, [token])

    def _look(self, followed: _Followed, tokens: list[int]) -> None:
        matcher = followed.matcher
        if matcher is None:
            return
        if tokens and not matcher.consume_tokens(tokens):
            followed.error = too_much(followed.form)
            return
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error() or not mask.any():
            followed.error = too_much(followed.form)
            return
        followed.mask = self._ended_in_time(followed, matcher, mask, len(tokens))

    def _ended_in_time(
        self, followed: _Followed, matcher: LLMatcher, mask: TokenMask, num_new: int
    ) -> TokenMask:
        """Return the mask, or that of one token if the answer has to end now."""
        if followed.ending is None and followed.num_left:
            followed.num_left = max(followed.num_left - num_new, 1)
            if followed.num_left <= MOST_TOKENS and not matcher.is_accepting():
                mask, followed.ending = self._endings.bounded(matcher, mask, followed.num_left)
        if followed.ending is None:
            return mask
        return self._endings.only(followed.ending.pop(0) if followed.ending else None, mask)


@dataclass(slots=True)
class _KnownForms:
    """Cache of matchers at the beginning of an answer: the last used ones, within the memory
    limit.
    """

    tokenizer: LLTokenizer
    _known: OrderedDict[Form, tuple[LLMatcher, int]] = field(default_factory=OrderedDict)
    _nbytes: int = 0

    def matcher(self, form: Form, nbytes: int) -> LLMatcher:
        """Return a private matcher for an answer.

        Raises:
            InvalidForm: The format can't be compiled.
        """
        if form in self._known:
            self._known.move_to_end(form)
        else:
            self._known[form] = compile_form(self.tokenizer, form), nbytes
            self._nbytes += nbytes
        matcher = self._known[form][0].deep_copy()
        while len(self._known) > _MAX_KNOWN or self._nbytes > _MAX_KNOWN_NBYTES:
            _, (_, freed) = self._known.popitem(last=False)
            self._nbytes -= freed
        return matcher
