"""A worker that executes the scheduler's steps and checks every property of them.

It searches items linearly, counts its resources, and knows the tokens of each sequence. In place of
a KV cache it has the content of each computed position.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from afferent.schedule.scheduler import Scheduler
from afferent.schedule.step import EncoderInput, Limits, Request, Step


@dataclass
class Known:
    """A sequence as the engine knows it, with items by absolute ``(offset, end, key)``."""

    request: Request
    arrival: int
    known: int  # number of tokens
    left: int  # tokens left in the current answer
    items: list[tuple[int, int, bytes]]
    inputs: list[tuple[int, int, list[EncoderInput], int]] = field(default_factory=list)
    given: int = 0  # positions before it are prompt or appended input
    computed: int = 0
    awaits: bool = False
    chosen: list[int] = field(default_factory=list)

    @property
    def content(self) -> list[tuple[int, bytes, int]]:
        """The token of each position, its item, and its place in the item."""
        tokens = [*self.request.token_ids, *self.chosen]
        content = [(token, b"", 0) for token in tokens]
        for offset, stop, key in self.items:
            content[offset:stop] = [(tokens[at], key, at - offset) for at in range(offset, stop)]
        return content

    @property
    def has_work(self) -> bool:
        return not self.awaits and (self.computed < self.given or self.left > 0)

    @property
    def can_go_on(self) -> bool:
        return not self.awaits and (self.has_work or bool(self.inputs))

    def take_up(self) -> None:
        """Place the next input; earlier tokens are computed, and the answer is complete."""
        assert not self.awaits
        assert self.left == 0
        assert self.computed >= self.given
        num_tokens, max_tokens, items, self.arrival = self.inputs.pop(0)
        for item in items:
            offset = self.known + item.placeholder.offset
            self.items.append((offset, offset + item.placeholder.length, item.key))
        self.known += num_tokens
        self.given, self.left = self.known, max_tokens

    def needs(self, start: int, end: int) -> set[bytes]:
        if self.request.cross_attention:
            return {key for _, _, key in self.items} if start == 0 < end else set()
        return {key for offset, stop, key in self.items if offset < end and stop > start}


class NaiveWorker:
    def __init__(self, limits: Limits, sizes: dict[bytes, int], nbytes: dict[bytes, int]) -> None:
        self.limits, self.sizes, self.nbytes = limits, sizes, nbytes
        self.sequences: dict[str, Known] = {}
        self.started: set[str] = set()  # sequences with computed tokens, and kept ones
        self.kv: dict[str, list[tuple[int, bytes, int]]] = {}  # of those with token ids
        self.embeddings: set[bytes] = set()

    def add(self, request: Request, arrival: int) -> None:
        items = [
            (i.placeholder.offset, i.placeholder.offset + i.placeholder.length, i.key)
            for i in request.items
        ]
        self.sequences[request.id] = Known(
            request, arrival, request.num_tokens, request.max_tokens, items,
            given=request.num_tokens,
        )  # fmt: skip

    def do(self, step: Step) -> list[str]:
        """Execute the step; return the sequences that got a token."""
        for placed in step.placed:
            known = self.sequences[placed.sequence_id]
            assert placed.start == known.known
            known.take_up()
        for sequence_id in step.drop:
            self.started.remove(sequence_id)  # each known sequence is dropped once
            self.kv.pop(sequence_id, None)
            if sequence_id in self.sequences:  # it was preempted
                known = self.sequences[sequence_id]
                assert not known.request.session_tokens, "a session is never preempted"
                assert not known.awaits
                known.computed, known.given = 0, known.known
        self._reuse(step)
        for key in step.evict:
            self.embeddings.remove(key)  # each known key is evicted once
        rows = 0
        for encode in step.encode:
            assert encode.key not in self.embeddings, "encoded twice"
            assert self.sequences[encode.sequence_id].items[encode.item][2] == encode.key
            rows += self.sizes[encode.key]
            self.embeddings.add(encode.key)
        assert rows <= self.limits.max_num_batched_embeds
        assert sum(self.sizes[k] for k in self.embeddings) <= self.limits.cache_num_embeds
        assert sum(self.nbytes[k] for k in self.embeddings) <= self.limits.cache_nbytes
        sampled = self._prefill(step) + self._decode(step)
        ids = [chunk.sequence_id for chunk in step.prefill] + step.decode
        assert len(set(ids)) == len(ids)
        tokens = sum(chunk.num_tokens for chunk in step.prefill) + len(step.decode)
        assert tokens <= self.limits.max_num_batched_tokens
        assert len(step.prefill) <= self.limits.max_step_prefills
        self._check_kv()
        return sampled

    def _reuse(self, step: Step) -> None:
        for reuse in step.reuse:
            known = self.sequences[reuse.sequence_id]
            assert reuse.sequence_id not in self.started
            assert known.computed == 0
            assert reuse.source_id not in self.sequences, "the source has ended"
            kv = self.kv.pop(reuse.source_id) if reuse.is_move else self.kv[reuse.source_id]
            if reuse.is_move:
                self.started.remove(reuse.source_id)
            assert 0 < reuse.num_tokens < known.known
            assert kv[: reuse.num_tokens] == known.content[: reuse.num_tokens]
            if not self.limits.can_split_items:
                cut = [o for o, stop, _ in known.items if o < reuse.num_tokens < stop]
                assert not cut, "cut in two"
            self.started.add(reuse.sequence_id)
            self.kv[reuse.sequence_id] = kv[: reuse.num_tokens]
            known.computed = reuse.num_tokens

    def _write(self, sequence_id: str, start: int, end: int) -> None:
        known = self.sequences[sequence_id]
        if known.request.token_ids:
            kv = self.kv.setdefault(sequence_id, [])
            assert len(kv) == start
            kv += known.content[start:end]

    def _prefill(self, step: Step) -> list[str]:
        sampled = []
        for chunk in step.prefill:
            known = self.sequences[chunk.sequence_id]
            end = chunk.start + chunk.num_tokens
            assert not known.awaits
            assert chunk.num_tokens > 0
            assert chunk.start == known.computed
            assert end <= known.given
            assert (chunk.start == 0) == (chunk.sequence_id not in self.started)
            self._write(chunk.sequence_id, chunk.start, end)
            assert known.needs(chunk.start, end) <= self.embeddings, "computed without embeddings"
            if not (self.limits.can_split_items or known.request.cross_attention):
                assert not any(offset < end < stop for offset, stop, _ in known.items), "cut in two"
            assert chunk.samples == (end == known.known and known.left > 0)
            self.started.add(chunk.sequence_id)
            known.computed, known.awaits = end, chunk.samples
            if chunk.samples:
                sampled.append(chunk.sequence_id)
        return sampled

    def _decode(self, step: Step) -> list[str]:
        for sequence_id in step.decode:
            known = self.sequences[sequence_id]
            assert sequence_id in self.started
            assert not known.awaits
            assert known.left > 0
            assert known.computed == known.known - 1
            self._write(sequence_id, known.computed, known.known)
            known.computed, known.awaits = known.known, True
        return list(step.decode)

    def _check_kv(self) -> None:
        blocks = 0
        for sequence_id, known in self.sequences.items():
            if sequence_id in self.started:
                tokens = known.request.session_tokens or known.computed
                blocks += -(-tokens // self.limits.kv_block_tokens)
        assert blocks <= self.limits.kv_num_blocks

    def token(
        self, scheduler: Scheduler, sequence_id: str, *, is_eos: bool, token_id: int | None = None
    ) -> None:
        """Record a chosen token; a complete answer ends a sequence, but not a session."""
        known = self.sequences.get(sequence_id)
        reason = scheduler.record(sequence_id, is_eos=is_eos, token_id=token_id)
        if known is None:
            assert reason is None
            return
        known.awaits = False
        if token_id is not None:
            known.chosen.append(token_id)
        known.known += 1
        known.left = 0 if is_eos else known.left - 1
        expected = None if known.left else "stop" if is_eos else "length"
        assert reason == expected
        if known.left == 0 and not known.request.session_tokens:
            del self.sequences[sequence_id]
