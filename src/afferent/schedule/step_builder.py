"""Construction of one step: divide its budgets among sequences, preempt for lack of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Final

from afferent.schedule.allotment import Allotment
from afferent.schedule.encoder_cache import EncoderCache, Plan
from afferent.schedule.kv_cache import KvCache
from afferent.schedule.sequence import Sequence
from afferent.schedule.step import Chunk, Encode, EncoderInput, Limits

_LEAST_CHUNK: Final = 128
"""Tokens of a chunk that ends because more items could not be encoded in its step."""


class StepBuilder:
    """Builder of one step.

    Invariants: sequences are visited in order of arrival, so victims are never in the step already.
    """

    def __init__(
        self,
        limits: Limits,
        cache: EncoderCache,
        kv: KvCache,
        running: Mapping[str, Sequence],
        allotment: Allotment | None,
        *,
        decoding: Collection[str],
        num_embeds: int,
    ) -> None:
        """Begin an empty step.

        Args:
            decoding: Sequences that have a token of their answer in this step.
            num_embeds: Rows to encode; a single item may have more.
            allotment: Tokens for prompts. Without it, the earliest sequence takes what it can use;
                if it finds no space for embeddings, it preempts at once, without a step's grace.
        """
        self._limits, self._cache, self._kv, self._running = limits, cache, kv, running
        self._force = allotment is None
        self._allotment = allotment or Allotment({})
        self._decoding = decoding
        self._tokens_left = limits.max_num_batched_tokens - len(decoding)
        self._embeds_left = num_embeds
        self._lacks_room = False
        self._lacks_kv = False
        self._lacks_rows = False
        self.encode: list[Encode] = []
        self.prefill: list[Chunk] = []
        self.decode: list[str] = []
        self.work: Counter[str] = Counter()
        """Positions of prompts and rows of embeddings, by sequence."""
        self.advanced: list[Sequence] = []
        self.preempted: list[Sequence] = []

    # Questions

    @property
    def has_work(self) -> bool:
        return bool(self.encode or self.prefill or self.decode)

    @property
    def is_blocked(self) -> bool:
        """A sequence lacks memory: no later one may take any."""
        return self._lacks_room or self._lacks_kv

    @property
    def can_admit(self) -> bool:
        """Whether budget is left, and no running sequence was denied memory."""
        has_room = self._tokens_left > 0 and len(self.prefill) < self._limits.max_step_prefills
        return has_room and not (self.is_blocked or self.preempted or self._force)

    # Changes

    def visit(self, sequence: Sequence) -> None:
        """Give the sequence what it can use."""
        own = self._allotment.take(sequence.id)
        if sequence.is_decoding:
            if sequence.id in self._decoding:
                self._decode(sequence)
            return
        # Tokens and prefill slots reserved for other sequences stay untouched.
        left = self._tokens_left - self._allotment.num_tokens
        others = 0 if own else len(self._allotment.tokens)
        has_place = len(self.prefill) + others < self._limits.max_step_prefills
        if sequence.is_prefilling and left > 0 and has_place:
            has_moved = self._prefill(sequence, left)
            sequence.was_held_up = own > 0 and not has_moved and self.is_blocked

    # Inner steps

    def _decode(self, sequence: Sequence) -> None:
        if self._kv_room(sequence) < 1:
            return
        self._kv.grow(sequence, sequence.num_computed + 1)
        sequence.num_computed += 1
        sequence.awaits_token = True
        self.decode.append(sequence.id)

    def _prefill(self, sequence: Sequence, num_tokens: int) -> bool:
        start = sequence.num_computed
        least = 1 if self._limits.can_split_items else sequence.index.whole_after(start) - start
        most = min(sequence.prefill_left, num_tokens)
        room = min(most, self._kv_room(sequence, least)) if most >= least else 0
        if room < least:
            return False
        end = start + room
        if not self._limits.can_split_items:
            end = sequence.index.whole_before(start, end)
        wanted, self._lacks_rows = end, False
        end = self._acquire_window(sequence, start, end)
        if end == start or (end < wanted and self._is_put_off(end - start)):
            return False
        self._kv.grow(sequence, end)
        self._tokens_left -= end - start
        self.work[sequence.id] += end - start
        samples = end == sequence.num_known and sequence.tokens_left > 0
        sequence.num_computed, sequence.awaits_token = end, samples
        self.prefill.append(Chunk(sequence.id, start, end - start, samples))
        self.advanced.append(sequence)
        return True

    def _is_put_off(self, num_tokens: int) -> bool:
        """Whether a chunk waits for more items: it is short, and ends where the step's rows did. A
        step has costs of its own, however few tokens it computes.
        """
        least = min(_LEAST_CHUNK, self._limits.max_num_batched_tokens // 4)
        return self._lacks_rows and not self._lacks_room and num_tokens < least

    def _kv_room(self, sequence: Sequence, least: int = 1) -> int:
        """Return the positions that fit; preempt later sequences to fit the first ``least``."""
        while (room := self._kv.room_for(sequence)) < least:
            victim = self._last_after(sequence)
            if victim is None:
                self._lacks_kv = True
                return 0
            self._preempt(victim)
        return room

    def _acquire_window(self, sequence: Sequence, start: int, end: int) -> int:
        """Acquire the embeddings of a chunk's items; return where the chunk must end."""
        index = sequence.index
        reached = index.in_window(start, end, self._limits.lookahead_tokens)
        for ordinal in range(max(reached.start, sequence.num_acquired), reached.stop):
            offset, _ = index.span(ordinal)
            is_needed = offset <= start
            if not self._acquire(sequence, ordinal, index[ordinal], is_needed=is_needed):
                return min(end, max(start, offset))
            sequence.num_acquired = ordinal + 1
        sequence.was_stuck = False
        return end

    def _acquire(
        self, sequence: Sequence, ordinal: int, item: EncoderInput, *, is_needed: bool
    ) -> bool:
        """Acquire one item's embeddings; the sequence cannot advance without those it needs."""
        plan = self._plan(sequence, item)
        if plan is None and is_needed:
            if sequence.was_stuck or self._force:
                plan = self._plan_with_victims(sequence, item)
            if plan is None:
                # One step's grace: other sequences usually release embeddings soon.
                sequence.was_stuck = self._lacks_room = True
        if plan is None or (self._lacks_room and plan.takes_room):
            return False
        if plan.needs_encode:
            reserved = self._allotment.num_rows
            if plan.num_embeds > self._embeds_left - reserved and (self.encode or reserved > 0):
                self._lacks_rows = True
                return False
            self._embeds_left -= plan.num_embeds
            self.work[sequence.id] += plan.num_embeds
            self.encode.append(Encode(sequence.id, ordinal, item.key))
        self._cache.commit(plan)
        return True

    def _plan(self, sequence: Sequence, item: EncoderInput) -> Plan | None:
        length = item.placeholder.length
        return self._cache.plan(sequence.id, item.key, num_embeds=length, nbytes=item.nbytes)

    def _plan_with_victims(self, sequence: Sequence, item: EncoderInput) -> Plan | None:
        plan = None
        while plan is None and (victim := self._last_after(sequence, holds_embeddings=True)):
            self._preempt(victim)
            plan = self._plan(sequence, item)
        return plan

    def _last_after(self, sequence: Sequence, *, holds_embeddings: bool = False) -> Sequence | None:
        """Return the latest preemptible sequence that arrived after this one."""
        found = None
        if self.is_blocked:
            return None  # freed memory would belong to earlier sequences
        for other in self._running.values():
            if other.is_session or other.awaits_token or not other.is_running:
                continue
            if holds_embeddings and not self._cache.uses(other.id):
                continue
            if other.arrival > (sequence if found is None else found).arrival:
                found = other
        return found

    def _preempt(self, victim: Sequence) -> None:
        self._kv.release(victim)
        self._cache.release_all(victim.id)
        self._allotment.take(victim.id)
        victim.is_running = False
        self.preempted.append(victim)
