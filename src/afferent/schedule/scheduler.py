"""Continuous batching: decide what the workers compute in the next step.

Pure logic, events in and actions out:

    add, append, abort, record, fail_item ──► Scheduler ──► next_step: a Step

- **Decoding first.** One token of the step's budget is set aside for each decoding sequence, so
  that a burst of prompts does not delay running streams.
- **Prompts share the rest.** Fair scheduling (`afferent.admission.turns`) follows the tenants'
  weights, and a small prompt does not wait behind a large one.
- **Memory is first come, first served.** The earliest sequence has the first pick of the encoder
  cache and of the KV cache. If space is short, the latest sequence is preempted.
- **Beginnings are computed once.** The KV cache of a sequence stays after its end, in blocks that
  no running sequence needs, for prompts of the same tenant that begin with the same tokens and
  items.
- **Cost.** Work follows the running sequences and their windows, not all sequences that ever ran.

A step counts as done when it is returned, because workers do steps in order. A sequence whose token
is being chosen waits for `record`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from operator import attrgetter

from afferent.admission.served import Served
from afferent.admission.turns import Turns
from afferent.errors import EncoderCacheFull, InvalidRequest
from afferent.schedule.allotment import Allotment, allot
from afferent.schedule.encoder_cache import EncoderCache
from afferent.schedule.kept import KeptSequences
from afferent.schedule.kv_cache import KvCache
from afferent.schedule.sequence import Input, Sequence
from afferent.schedule.step import (
    UNLIMITED,
    EncoderInput,
    FinishReason,
    Limits,
    Placed,
    Request,
    Reuse,
    Step,
)
from afferent.schedule.step_builder import StepBuilder

_arrival = attrgetter("arrival")

# Destroying 32K items takes a millisecond, so a step destroys only this many ended items.
_SHED_PER_STEP = 64


class Scheduler:
    """Scheduler of an engine's steps.

    Events: `add`, `append`, `abort`, `record`, `fail_item`, `clear`. Action: `next_step`.

    Examples:
        >>> from afferent.schedule import Limits, Request, Scheduler
        >>> scheduler = Scheduler(Limits(max_num_seqs=4, max_num_batched_tokens=8))
        >>> scheduler.add(Request(id="a", num_tokens=10, max_tokens=2))
        >>> [(chunk.start, chunk.num_tokens) for chunk in scheduler.next_step().prefill]
        [(0, 8)]
        >>> [(chunk.start, chunk.num_tokens) for chunk in scheduler.next_step().prefill]
        [(8, 2)]
        >>> scheduler.record("a", is_eos=False)  # the workers have chosen a token
        >>> scheduler.next_step().decode
        ['a']

    Invariants:
        - A sequence is either waiting or running until it ends.
        - Kept sequences change nothing but where a sequence begins: their blocks count as free.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_arrivals = 0
        self._waiting: dict[str, Sequence] = {}
        self._running: dict[str, Sequence] = {}
        self._turns: Turns[str] = Turns()  # all sequences with uncomputed prompt
        self._answers: Served[str] = Served()  # answer tokens by request, of the running sequences
        self._dropped: list[str] = []
        self._reused: dict[str, Reuse] = {}  # of this step, by the sequence that begins
        self._kept = KeptSequences()
        self._ended: deque[Sequence] = deque()
        self._reset_caches()

    # Questions

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def cache(self) -> EncoderCache:
        """Encoder cache of the workers; read it, do not change it."""
        return self._cache

    @property
    def num_kv_blocks_free(self) -> int:
        return self._kv.num_free

    @property
    def kv_in_use(self) -> float:
        """Part of the KV cache in use, 0 to 1."""
        return 1.0 - self._kv.num_free / self._kv.num_blocks

    @property
    def is_held_up(self) -> bool:
        """Whether the next waiting sequence lacks memory, or there are too many running ones."""
        first = self._waiting.get(self._turns.first or "")
        return first is not None and not self._may_begin(first, len(self._running))

    def is_running(self, sequence_id: str) -> bool:
        return sequence_id in self._running

    def has_all_items(self, sequence_id: str) -> bool:
        """Return whether each of its items is encoded, or is in the last returned step."""
        sequence = self._find(sequence_id)
        return sequence.num_acquired == sequence.index.num_seen

    def num_items_acquired(self, sequence_id: str) -> int:
        """Return how many items, from the first on, are encoded or in the last returned step.

        A preemption resets the number to 0.
        """
        return self._find(sequence_id).num_acquired

    def num_items_kept(self, sequence_id: str) -> int:
        """Return the number of items that are not dropped; of a session, the uncomputed ones."""
        return len(self._find(sequence_id).index)

    # Events

    def add(self, request: Request) -> None:
        """Add a new sequence to the waiting ones. O(its items).

        Raises:
            InvalidRequest: Its id is taken, or it has no tokens.
            InvalidPlaceholders: Its items are not in order, overlap or leave the prompt.
            EncoderCacheFull: An item exceeds the encoder's rows of a step, the capacity of the
                cache, or the positions that can be computed at once.
            PromptTooLong: It exceeds the whole KV cache.
        """
        if request.id in self._running or request.id in self._waiting:
            raise InvalidRequest(f"sequence {request.id} exists")
        sequence = Sequence.of(request, arrival=self._num_arrivals)
        self._check_items(sequence, request.items)
        self._kv.check_fits(sequence)
        if (kept := self._kept.remove(request.id)) is not None:  # the id is used again
            self._drop(kept)
        self._num_arrivals += 1
        self._waiting[request.id] = sequence
        # The turn of a sequence is that of the whole request.
        cost = _cost(request.num_tokens, request.items) * request.num_answers
        self._turns.enter(request.id, share=request.share, cost=cost)

    def append(
        self,
        session_id: str,
        *,
        num_tokens: int,
        max_tokens: int,
        items: Items[EncoderInput] = (),
    ) -> None:
        """Append input to a session, after the answer to its earlier input. O(these items).

        Args:
            session_id: Of a request with ``session_tokens``.
            num_tokens: Length of the input; it is placed after all tokens that the session has.
            max_tokens: Limit of the answer to it; 0 for no answer.
            items: Their offsets count from the input's first token.

        Raises:
            InvalidRequest: There is no such session.
            InvalidPlaceholders: The items are not in order, overlap or leave the input.
            EncoderCacheFull: As in `add`.
            PromptTooLong: The session's limit would be exceeded.
        """
        session = self._find(session_id)
        if not session.is_session:
            raise InvalidRequest(f"sequence {session_id} is no session")
        self._check_items(session, items)
        session.append(Input(self._num_arrivals, num_tokens, max_tokens, items))
        self._num_arrivals += 1

    def record(
        self, sequence_id: str, *, is_eos: bool, token_id: int | None = None
    ) -> FinishReason | None:
        """Record that the workers chose a token; return the reason if the answer is complete.

        After a complete answer a session waits for input; any other sequence has ended. A sequence
        that was aborted while the step ran is ignored.
        """
        sequence = self._running.get(sequence_id)
        if sequence is None or not sequence.awaits_token:
            return None
        sequence.on_token(is_eos=is_eos, token_id=token_id)
        if sequence.tokens_left > 0:
            return None
        if not sequence.is_session:
            self._end(sequence, may_keep=True)
        return FinishReason.STOP if is_eos else FinishReason.LENGTH

    def abort(self, sequence_id: str) -> None:
        """End a sequence whose client is gone, or a session; unknown ids are ignored."""
        sequence = self._running.get(sequence_id) or self._waiting.get(sequence_id)
        if sequence is not None:
            self._end(sequence)

    def fail_item(self, key: bytes) -> list[str]:
        """End the sequences that use an item that could not be encoded; return their ids."""
        lost = sorted(self._cache.discard(key))
        for sequence_id in lost:
            self.abort(sequence_id)
        return lost

    def clear(self) -> list[str]:
        """Remove all sequences after the workers and their caches are lost; return their ids."""
        lost = [*self._running, *self._waiting]
        self._ended += [*self._running.values(), *self._waiting.values(), *self._kept.clear()]
        self._running.clear()
        self._waiting.clear()
        self._turns = Turns()
        self._answers.clear()
        self._dropped.clear()
        self._reused.clear()
        self._reset_caches()
        return lost

    # Action

    def next_step(self, *, num_embeds: int = UNLIMITED, num_decodes: int = UNLIMITED) -> Step:
        """Return the work to do now; an empty step when there is none before the next event.

        O(running sequences + items that their windows newly reach).

        Args:
            num_embeds: Most rows of embeddings to encode in this step, if that is less than
                `Limits` allow: for engines that bound the time of a step. One item is encoded in
                any case.
            num_decodes: Most sequences that have a token in this step, if that is less than
                `Limits` allow; at least 1.
        """
        self._shed()
        sessions = [sequence for sequence in self._running.values() if sequence.inputs]
        placed = [p for session in sessions if (p := self._take_up_input(session)) is not None]
        num_embeds = min(num_embeds, self._limits.max_num_batched_embeds)
        if self._waiting and self._has_many:
            self._kv.count_promised(self._running.values())
        num_decodes = min(num_decodes, self._limits.max_step_decodes)
        decoding = self._decoding(num_decodes)
        allotment = self._allot(num_embeds, num_decodes=len(decoding))
        builder = self._build(allotment, decoding, num_embeds)
        if not builder.has_work and builder.is_blocked:
            # No sequence can advance, so none will release memory: the earliest takes what it
            # needs.
            earliest = self._decoding(num_decodes, is_forced=True)
            builder = self._build(None, earliest, num_embeds)
        self._charge(builder)
        step = Step(
            drop=self._dropped,
            evict=self._cache.report_evicted(),
            placed=placed,
            encode=builder.encode,
            prefill=builder.prefill,
            decode=builder.decode,
            reuse=list(self._reused.values()),
        )
        self._dropped, self._reused = [], {}
        # In the next step: this one may begin with them.
        most_blocks = self._limits.max_kept_tokens // self._limits.kv_block_tokens
        for kept in self._kept.shrink(min(self._kv.num_free, most_blocks)):
            self._drop(kept)
        # Release after the report: a step must not evict what it reads.
        for sequence in builder.advanced:
            self._release_consumed(sequence)
        return step

    # Inner steps

    def _reset_caches(self) -> None:
        limits = self._limits
        self._cache = EncoderCache(
            capacity_embeds=limits.cache_num_embeds, capacity_nbytes=limits.cache_nbytes
        )
        self._kv = KvCache(num_blocks=limits.kv_num_blocks, block_tokens=limits.kv_block_tokens)

    def _find(self, sequence_id: str) -> Sequence:
        sequence = self._running.get(sequence_id) or self._waiting.get(sequence_id)
        if sequence is None:
            raise InvalidRequest(f"there is no sequence {sequence_id}")
        return sequence

    def _check_items(self, sequence: Sequence, items: Items[EncoderInput]) -> None:
        """Refuse items that could never be encoded."""
        # Sizes are part of the key: of items with one key and several sizes, the first one reached
        # is planned.
        sizes = ((item.key, item.placeholder.length, item.nbytes) for item in items)
        distinct = dict(zip(sizes, items, strict=True)).values()
        for item in distinct:
            if item.placeholder.length > self._limits.max_num_batched_embeds:
                raise EncoderCacheFull(
                    f"an item of {item.placeholder.length} embeddings exceeds the encoder's "
                    f"{self._limits.max_num_batched_embeds} rows a step"
                )
            at_once = item.placeholder.length if sequence.index.takes_positions else 0
            if at_once > self._limits.max_item_tokens:
                raise EncoderCacheFull(
                    f"an item of {item.placeholder.length} positions is computed at once, and "
                    f"exceeds the {self._limits.max_item_tokens} that a step has for it"
                )
        needed_at_once = sequence.index.needed_at_once
        self._cache.check_fits(
            num_embeds=needed_at_once(item.placeholder.length for item in distinct),
            nbytes=needed_at_once(item.nbytes for item in distinct),
        )

    def _take_up_input(self, session: Sequence) -> Placed | None:
        more = session.inputs[0]
        placed = session.take_up_input()
        if placed is not None:
            cost = _cost(more.num_tokens, more.items)
            self._turns.enter(session.id, share=session.share, cost=cost)
            self._turns.begin(session.id)
        return placed

    def _decoding(self, limit: int, *, is_forced: bool = False) -> list[str]:
        """Return the sequences that have a token in this step: all, or the fair choice.

        In a forced step the earliest are chosen: only these always find a sequence to preempt.
        """
        found = [sequence for sequence in self._running.values() if sequence.is_decoding]
        if len(found) > limit:
            if is_forced:
                found.sort(key=_arrival)
            else:
                rank = self._answers.rank
                found.sort(key=lambda each: (*rank(each.answer_of, each.share), each.arrival))
            del found[limit:]
        return [sequence.id for sequence in found]

    @property
    def _has_many(self) -> bool:
        """Whether more sequences may come to run than have a token in a step."""
        return len(self._running) + len(self._waiting) > self._limits.max_step_decodes

    def _may_begin(self, sequence: Sequence, num_running: int) -> bool:
        """Return whether a sequence may run beside ``num_running`` others."""
        if num_running >= self._limits.max_num_seqs:
            return False
        running = self._running.values()
        if num_running < self._limits.max_step_decodes:
            return self._kv.can_admit(sequence, running)
        return self._kv.can_admit(sequence, running) and self._kv.fits_beside(sequence)

    def _encodable(
        self, sequence: Sequence, num_tokens: int, num_embeds: int, num_reserved: int
    ) -> tuple[int, int]:
        """Return how many of the tokens fit in the remaining rows, and how many rows they need.

        The first item of a step may exceed the rows.
        """
        start, rows, index = sequence.num_computed, 0, sequence.index
        reached = index.in_window(start, start + num_tokens, self._limits.lookahead_tokens)
        for ordinal in range(max(reached.start, sequence.num_acquired), reached.stop):
            item = index[ordinal]
            if item.key in self._cache:
                continue
            needed = item.placeholder.length
            if num_reserved + rows and num_reserved + rows + needed > num_embeds:
                return min(num_tokens, max(0, index.span(ordinal)[0] - start)), rows
            rows += needed
        return num_tokens, rows

    def _allot(self, num_embeds: int, *, num_decodes: int) -> Allotment:
        limits, num_running = self._limits, len(self._running)

        def may_begin(sequence: Sequence, num_others: int) -> bool:
            return self._may_begin(sequence, num_running + num_others)

        def encodable(sequence: Sequence, num_tokens: int, num_reserved: int) -> tuple[int, int]:
            return self._encodable(sequence, num_tokens, num_embeds, num_reserved)

        return allot(
            self._turns,
            self._running,
            self._waiting,
            num_tokens=limits.max_num_batched_tokens - num_decodes,
            num_prefills=limits.max_step_prefills,
            may_begin=may_begin,
            encodable=encodable,
        )

    def _build(
        self, allotment: Allotment | None, decoding: Items[str], num_embeds: int
    ) -> StepBuilder:
        """Build a step: from running sequences in order of arrival, then from waiting ones."""
        builder = StepBuilder(
            self._limits,
            self._cache,
            self._kv,
            self._running,
            allotment,
            decoding=frozenset(decoding),
            num_embeds=num_embeds,
        )
        for sequence in sorted(self._running.values(), key=_arrival):
            if sequence.is_running:  # not preempted by an earlier one
                builder.visit(sequence)
        self._admit(builder)
        for victim in builder.preempted:
            self._requeue(victim)
        return builder

    def _requeue(self, victim: Sequence) -> None:
        """Queue a preempted sequence at no cost: it was charged when it first began."""
        del self._running[victim.id]
        self._answers.leave(victim.answer_of, victim.share)
        if (reuse := self._reused.pop(victim.id, None)) is not None:  # it has not begun
            if reuse.is_move:
                self._dropped.append(reuse.source_id)
        elif victim.num_computed > 0:
            self._dropped.append(victim.id)
        victim.rewind()
        self._waiting[victim.id] = victim
        self._leave_turns(victim)
        self._turns.enter(victim.id, share=victim.share, cost=0)

    def _admit(self, builder: StepBuilder) -> None:
        """Let waiting sequences begin, in fair order, until the first of them cannot."""
        while builder.can_admit:
            sequence_id = self._turns.first
            if sequence_id is None:
                return
            first = self._waiting[sequence_id]
            if not self._may_begin(first, len(self._running)):
                return
            del self._waiting[sequence_id]
            self._turns.begin(sequence_id)
            self._running[sequence_id] = first
            self._answers.enter(first.answer_of, first.share)
            self._kv.promise(first)
            first.is_running = True
            if first.is_session:
                self._kv.reserve(first)
            else:
                self._reuse(first)
            builder.visit(first)

    def _reuse(self, sequence: Sequence) -> None:
        """Let a sequence begin with the KV cache of one that has ended, if there is one."""
        if not len(self._kept) or not sequence.gather_tokens():
            return
        found = self._kept.reuse(sequence, splits_items=self._limits.can_split_items)
        if found is None:
            return
        reuse, source = found
        self._reused[sequence.id] = reuse
        self._kv.grow(sequence, reuse.num_tokens)
        sequence.begin_after(reuse.num_tokens)
        if reuse.is_move:
            self._ended.append(source)

    def _charge(self, builder: StepBuilder) -> None:
        for sequence_id, work in builder.work.items():
            self._turns.charge(sequence_id, work)
        for sequence_id in builder.decode:
            sequence = self._running[sequence_id]
            self._answers.charge(sequence.answer_of, sequence.share, 1)
        for sequence in builder.advanced:
            if not sequence.is_prefilling:
                self._turns.leave(sequence.id)

    def _leave_turns(self, sequence: Sequence) -> None:
        if sequence.id in self._turns:
            self._turns.leave(sequence.id)

    def _release_consumed(self, sequence: Sequence) -> None:
        """Release the embeddings of items that are wholly computed."""
        index = sequence.index
        consumed = index.num_consumed(sequence.num_computed)
        for ordinal in range(sequence.num_released, consumed):
            self._cache.release(sequence.id, index[ordinal].key)
        sequence.num_released = consumed
        if sequence.is_session:
            index.drop_consumed(sequence.num_computed)

    def _end(self, sequence: Sequence, *, may_keep: bool = False) -> None:
        """End a sequence.

        Args:
            may_keep: Whether the workers have done all its steps, so that its KV cache can stay.
        """
        self._leave_turns(sequence)
        if not sequence.is_running:
            del self._waiting[sequence.id]
            self._ended.append(sequence)
            return
        del self._running[sequence.id]
        self._answers.leave(sequence.answer_of, sequence.share)
        num_blocks = sequence.num_blocks
        self._kv.release(sequence)
        self._cache.release_all(sequence.id)
        if may_keep and self._limits.max_kept_tokens and sequence.gather_tokens():
            sequence.num_blocks = num_blocks
            for contained in self._kept.add(sequence):
                self._drop(contained)
        else:
            self._drop(sequence)

    def _drop(self, ended: Sequence) -> None:
        """Have the workers drop a sequence that has ended."""
        if ended.num_computed > 0:
            self._dropped.append(ended.id)
        self._ended.append(ended)

    def _shed(self) -> None:
        """Destroy a few items of sequences that have ended."""
        left = _SHED_PER_STEP
        while self._ended and left > 0:
            num_shed = self._ended[0].shed(left)
            left -= num_shed
            if num_shed == 0:
                self._ended.popleft()
                left -= 1


def _cost(num_tokens: int, items: Items[EncoderInput]) -> int:
    """Return the positions to compute plus the rows of embeddings to encode."""
    return num_tokens + sum(item.placeholder.length for item in items)
