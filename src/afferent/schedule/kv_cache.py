"""Who holds how much of the KV cache: a count of blocks. Pure.

A sequence's blocks grow with what is computed of it. A session's are taken all at once when it is
admitted: it is never preempted, so it must never have to wait for memory that others hold.
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
        """Could it ever be held?

        Raises:
            PromptTooLong: It exceeds the total capacity.
        """
        if self._blocks(sequence.kv_need_tokens) > self.num_blocks:
            raise PromptTooLong(
                f"prompt and answer of {sequence.kv_need_tokens} tokens exceed the KV cache "
                f"of {self.num_blocks * self._block_tokens}"
            )

    def can_admit(self, sequence: Sequence, running: Iterable[Sequence]) -> bool:
        """May it begin without ever blocking the oldest for good?

        Beside all sessions, the largest of the other sequences must still fit. And what is known
        of it must fit now: else it would be preempted before it has chosen a token.
        """
        need = self._blocks(sequence.kv_need_tokens)
        if not sequence.is_session:
            fits_now = self._blocks(sequence.num_known) <= self.num_free
            return fits_now and self._num_reserved + need <= self.num_blocks
        largest = max((s.kv_need_tokens for s in running if not s.is_session), default=0)
        total = self._num_reserved + need + self._blocks(largest)
        return need <= self.num_free and total <= self.num_blocks

    def fits_beside(self, sequence: Sequence) -> bool:
        """Whether its prompt and answer take at most half of the space that is left when all
        running sequences have grown to their ends. So it never causes a preemption, and smaller
        sequences still find space after it.
        """
        return 2 * self._blocks(sequence.kv_need_tokens) <= self._num_unpromised

    def room_for(self, sequence: Sequence) -> int:
        """How many more positions of it could be computed."""
        held = sequence.num_blocks
        if not sequence.is_session:
            held += self.num_free
        return held * self._block_tokens - sequence.num_computed

    # Changes

    def count_promised(self, running: Iterable[Sequence]) -> None:
        """Count the blocks that are left when all running sequences have grown to their ends, for
        `fits_beside`. O(running sequences).
        """
        promised = sum(
            self._blocks(each.kv_need_tokens) - each.num_blocks
            for each in running
            if not each.is_session
        )
        self._num_unpromised = self.num_free - promised

    def promise(self, sequence: Sequence) -> None:
        """Count what a sequence that begins now may come to need."""
        self._num_unpromised -= self._blocks(sequence.kv_need_tokens)

    def reserve(self, session: Sequence) -> None:
        """Take all that a session may need."""
        session.num_blocks = self._blocks(session.kv_need_tokens)
        self.num_free -= session.num_blocks
        self._num_reserved += session.num_blocks

    def grow(self, sequence: Sequence, end: int) -> None:
        """Take what the positions before ``end`` need and it does not hold yet."""
        missing = self._blocks(end) - sequence.num_blocks
        if missing > 0:
            sequence.num_blocks += missing
            self.num_free -= missing

    def release(self, sequence: Sequence) -> None:
        """Give back all it holds."""
        self.num_free += sequence.num_blocks
        if sequence.is_session:
            self._num_reserved -= sequence.num_blocks
        sequence.num_blocks = 0

    # Inner steps

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)
