"""State of one sequence between its arrival and its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from afferent.admission.shares import NAMELESS, Share
from afferent.errors import InvalidPlaceholders, InvalidRequest, PromptTooLong
from afferent.schedule.step import EncoderInput, Placed, Request
from afferent.schedule.window import CrossAttentionIndex, WindowIndex

Index = WindowIndex[EncoderInput]
_NO_TOKENS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Input:
    """Input appended to a session and not yet taken up; offsets count from its first token.

    ``arrival`` is its position in the order of all input: first come, first served.
    """

    arrival: int
    num_tokens: int
    max_tokens: int
    items: Items[EncoderInput]


@dataclass(slots=True, eq=False)
class Sequence:
    id: str
    arrival: int
    index: Index
    num_known: int
    """Number of known tokens: prompt, input taken up, answers."""
    tokens_left: int
    """Number of tokens that may still be chosen for the current answer."""
    max_known: int
    """Largest possible ``num_known``, with all accepted input."""
    session_tokens: int = 0
    share: Share = NAMELESS
    answer_of: str = ""
    inputs: deque[Input] = field(default_factory=deque)
    prefill_end: int = 0
    """Positions before it are known and computed in chunks; those after it are decoded."""
    num_computed: int = 0
    num_acquired: int = 0
    """Items before this ordinal had their embeddings committed since the sequence began."""
    num_released: int = 0
    """Items before this ordinal need their embeddings no more."""
    num_blocks: int = 0
    """Blocks of the KV cache that it has."""
    awaits_token: bool = False
    """A running step chooses its next token."""
    is_running: bool = False
    was_stuck: bool = False
    """The last step found no space in the encoder cache for an item that it needed to advance."""
    was_held_up: bool = False
    """The last step gave it tokens, and it could not use them for lack of space."""
    tokens: NDArray[np.int64] = field(default_factory=lambda: _NO_TOKENS)
    """Known tokens, without those in ``chosen``; empty if its KV cache is not kept."""
    chosen: list[int] = field(default_factory=list)
    """Tokens chosen since the last `gather_tokens`."""

    @classmethod
    def of(cls, request: Request, *, arrival: int) -> Sequence:
        """Return the sequence of a new request.

        Raises:
            InvalidRequest: It has no token, requests no answer, or has other tokens than it says.
            InvalidPlaceholders: Its items are not in order, overlap or leave the prompt.
            PromptTooLong: A session's first input exceeds its own limit.
        """
        is_session = request.session_tokens > 0
        if request.num_tokens < 1 or request.max_tokens < (0 if is_session else 1):
            raise InvalidRequest("a prompt and an answer need one token at least")
        if request.token_ids and len(request.token_ids) != request.num_tokens:
            raise InvalidRequest(
                f"a prompt of {request.num_tokens} tokens has {len(request.token_ids)} token ids"
            )
        if is_session and request.cross_attention:
            raise InvalidRequest("an encoder-decoder model takes no further input: no sessions")
        sequence = cls(
            id=request.id,
            arrival=arrival,
            index=_index(request.items, request.num_tokens, request.cross_attention),
            num_known=request.num_tokens,
            tokens_left=request.max_tokens,
            max_known=request.num_tokens + request.max_tokens,
            session_tokens=request.session_tokens,
            share=request.share,
            answer_of=request.answer_of or request.id,
            prefill_end=request.num_tokens,
            tokens=np.array(request.token_ids, np.int64),
        )
        sequence._check_length(sequence.max_known)
        return sequence

    # Questions

    @property
    def is_session(self) -> bool:
        return self.session_tokens > 0

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.prefill_end

    @property
    def is_decoding(self) -> bool:
        """Whether it can compute one token now."""
        return not self.is_prefilling and self.tokens_left > 0 and not self.awaits_token

    @property
    def is_idle(self) -> bool:
        """Whether all its input is computed and answered."""
        return not self.is_prefilling and self.tokens_left == 0 and not self.awaits_token

    @property
    def prefill_left(self) -> int:
        """Number of known positions that are not computed yet."""
        return self.prefill_end - self.num_computed

    @property
    def kv_need_tokens(self) -> int:
        """Largest number of positions that it may come to store."""
        return self.session_tokens or self.max_known

    # Changes

    def append(self, more: Input) -> None:
        """Queue input; it is placed after all tokens that exist when it is taken up.

        Raises:
            InvalidRequest: It has no token.
            InvalidPlaceholders: Its items are not in order, overlap or leave it.
            PromptTooLong: With it, the session could exceed its limit.
        """
        if more.num_tokens < 1 or more.max_tokens < 0:
            raise InvalidRequest("input needs one token at least")
        longest = self.max_known + more.num_tokens + more.max_tokens
        self._check_length(longest)
        _index(more.items, more.num_tokens, cross_attention=False)
        self.max_known = longest
        self.inputs.append(more)

    def take_up_input(self) -> Placed | None:
        """Place the next input, if the answer before it is complete."""
        if not self.inputs or not self.is_idle:
            return None
        placed = Placed(self.id, self.num_known)
        more = self.inputs.popleft()
        self.index.extend([(i.placeholder, i) for i in more.items], base=self.num_known)
        self.arrival = more.arrival
        self.num_known += more.num_tokens
        self.prefill_end = self.num_known
        self.tokens_left = more.max_tokens
        return placed

    def begin_after(self, num_tokens: int) -> None:
        """Begin with so many positions computed already."""
        self.num_computed = num_tokens
        self.num_acquired = self.num_released = self.index.num_consumed(num_tokens)

    def gather_tokens(self) -> bool:
        """Put all known tokens into ``tokens``; return whether they are known here."""
        if self.chosen:
            self.tokens = np.append(self.tokens, np.array(self.chosen, np.int64))
            self.chosen.clear()
        return len(self.tokens) == self.num_known

    def on_token(self, *, is_eos: bool, token_id: int | None = None) -> None:
        """Record a chosen token: it is known now, and computed next."""
        if token_id is not None:
            self.chosen.append(token_id)
        self.awaits_token = False
        self.num_known += 1
        self.tokens_left -= 1
        if is_eos:
            self.max_known -= self.tokens_left
            self.tokens_left = 0

    def rewind(self) -> None:
        """Reset all computed state; all known tokens have to be prefilled again."""
        self.num_computed = self.num_acquired = self.num_released = self.num_blocks = 0
        self.prefill_end = self.num_known
        self.is_running = self.was_stuck = self.was_held_up = False

    def shed(self, limit: int) -> int:
        """Destroy up to ``limit`` pieces of a sequence that has ended; return how many."""
        num_shed = 0
        while self.inputs and num_shed < limit:
            num_shed += 1 + len(self.inputs.popleft().items)
        return num_shed + (self.index.shed(limit - num_shed) if num_shed < limit else 0)

    # Inner steps

    def _check_length(self, longest: int) -> None:
        if self.is_session and longest > self.session_tokens:
            raise PromptTooLong(
                f"with this input the session may reach {longest} tokens; its limit is "
                f"{self.session_tokens}"
            )


def _index(items: Items[EncoderInput], num_tokens: int, cross_attention: bool) -> Index:
    kind = CrossAttentionIndex if cross_attention else WindowIndex
    index: Index = kind((item.placeholder, item) for item in items)
    if index.end > num_tokens:
        raise InvalidPlaceholders(
            f"item {len(index) - 1} ends at {index.end}, after the last of {num_tokens} tokens"
        )
    return index
