"""Accounting of the KV cache: a count of blocks per sequence. Pure.

The blocks of a sequence grow with its computed positions. A session reserves all its blocks when it
is admitted: it is never preempted, so it must never wait for memory of other sequences.
"""

from __future__ import annotations

from collections.abc import Iterable

from afferent.errors import PromptTooLong
from afferent.schedule.sequence import Sequence


class KvCache:
    def __init__(self, *, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks, self._block_tokens = num_blocks, block_tokens
        self.num_free = num_blocks
        self._num_reserved = 0  # by sessions
        self._num_unpromised = num_blocks  # since `count_promised`

    # Questions

    def check_fits(self, sequence: Sequence) -> None:
        """Check that a sequence can fit at all.

        Raises:
            PromptTooLong: It exceeds the total capacity.
        """
        if self._blocks(sequence.kv_need_tokens) > self.num_blocks:
            raise PromptTooLong(
                f"prompt and answer of {sequence.kv_need_tokens} tokens exceed the KV cache "
                f"of {self.num_blocks * self._block_tokens}"
            )

    def can_admit(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """Return whether a sequence may begin without blocking the oldest one for good.

        - Beside all sessions, the largest of the other sequences must still fit.
        - All known tokens of a sequence that is no session must fit now: else it would be preempted
          before it has chosen a token.
        """
        need = self._blocks(sequence.kv_need_tokens)
        if not sequence.is_session:
            fits_now = self._blocks(sequence.num_known) <= self.num_free
            return fits_now and self._num_reserved + need <= self.num_blocks
        largest = max((s.kv_need_tokens for s in running if not s.is_session), default=0)
        total = self._num_reserved + need + self._blocks(largest)
        return need <= self.num_free and total <= self.num_blocks

    def fits_beside(self, sequence: Sequence) -> bool:
        """Return whether its prompt and answer take at most half of the unpromised space.

        That is the space left when all running sequences have grown to their ends. So the sequence
        never causes a preemption, and smaller sequences still find space after it.
        """
        return 2 * self._blocks(sequence.kv_need_tokens) <= self._num_unpromised

    def room_for(self, sequence: Sequence) -> int:
        """Return how many more positions of a sequence could be computed."""
        held = sequence.num_blocks
        if not sequence.is_session:
            held += self.num_free
        return held * self._block_tokens - sequence.num_computed

    # Changes

    def count_promised(self, running: Iterable[Sequence]) -> None:
        """Count the blocks left when all running sequences have grown to their ends.

        `fits_beside` uses this number. O(running sequences).
        """
        promised = sum(
            self._blocks(each.kv_need_tokens) - each.num_blocks
            for each in running
            if not each.is_session
        )
        self._num_unpromised = self.num_free - promised

    def promise(self, sequence: Sequence) -> None:
        """Count the blocks that a sequence which begins now may come to need."""
        self._num_unpromised -= self._blocks(sequence.kv_need_tokens)

    def reserve(self, session: Sequence) -> None:
        """Take all blocks that a session may need."""
        session.num_blocks = self._blocks(session.kv_need_tokens)
        self.num_free -= session.num_blocks
        self._num_reserved += session.num_blocks

    def grow(self, sequence: Sequence, end: int) -> None:
        """Take the blocks that the positions before ``end`` need and the sequence lacks."""
        missing = self._blocks(end) - sequence.num_blocks
        if missing > 0:
            sequence.num_blocks += missing
            self.num_free -= missing

    def release(self, sequence: Sequence) -> None:
        """Return all blocks of a sequence."""
        self.num_free += sequence.num_blocks
        if sequence.is_session:
            self._num_reserved -= sequence.num_blocks
        sequence.num_blocks = 0

    # Inner steps

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)
