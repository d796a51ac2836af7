"""The scheduler with a worker that checks everything, under random events."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from afferent.admission.shares import Share
from afferent.errors import EncoderCacheFull, PromptTooLong
from afferent.schedule.kept import KeptSequences
from afferent.schedule.scheduler import Scheduler
from afferent.schedule.step import UNLIMITED, EncoderInput, Limits, Request, Step
from afferent.types import Placeholder
from tests.schedule.naive import NaiveWorker
from tests.schedule.settings import STATE_MACHINE

SIZES = {bytes([n]): rows for n, rows in enumerate((1, 2, 2, 3, 4, 5, 6, 6))}
NBYTES = {key: rows * (5 if key[0] % 3 else 9) for key, rows in SIZES.items()}
MOST_STEPS_FOR_THE_FIRST = 40

limits = st.builds(
    Limits,
    max_num_seqs=st.sampled_from([1, 2, 3, 4, 4, 4]),
    max_step_decodes=st.sampled_from([1, 2, UNLIMITED]),
    max_num_batched_tokens=st.integers(4, 12),
    max_step_prefills=st.sampled_from([1, 2, 9]),
    max_num_batched_embeds=st.sampled_from([6, 6, 8, 14]),
    cache_num_embeds=st.sampled_from([12, 12, 13, 16, 24]),
    cache_nbytes=st.sampled_from([108, 120, 999]),
    kv_num_blocks=st.sampled_from([14, 20, 30, 45, 120]),
    kv_block_tokens=st.integers(1, 2),
    max_kept_tokens=st.sampled_from([0, 5, 20, 60, 60]),
    lookahead_tokens=st.sampled_from([0, 0, 3, 9]),
    can_split_items=st.booleans(),
)
parts = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(sorted(SIZES))), max_size=4)
kinds = st.sampled_from(["prompt", "prompt", "prompt", "cross", "cross", "session"])
shapes = st.tuples(parts, st.integers(1, 4), st.sampled_from([1, 2, 4, 9]), kinds)

budgets = st.sampled_from([1, 4, UNLIMITED, UNLIMITED])
"""Limits of a step, which the engine passes."""


def laid_out(gaps: list[tuple[int, bytes]], *, flat: bool = False) -> list[EncoderInput]:
    """Return items one after another with gaps between them, or all at offset 0."""
    items, position = [], 0
    for gap, key in gaps:
        offset = 0 if flat else position + gap
        items.append(EncoderInput(key, Placeholder(offset, SIZES[key]), NBYTES[key]))
        position = offset + SIZES[key]
    return items


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(limits=limits)
    def start(self, limits: Limits) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits)
        self.scheduler._kept = KeptSequences(least_tokens=2)
        self.worker = NaiveWorker(limits, SIZES, NBYTES)
        self.sampled: list[str] = []
        self.num_arrivals = 0
        self.first_in_line: tuple[str, int] = ("", 0)

    def arrive(self) -> int:
        self.num_arrivals += 1
        return self.num_arrivals

    @rule(shapes=st.lists(shapes, min_size=1, max_size=3))
    def arrive_together(self, shapes: list[tuple[list[tuple[int, bytes]], int, int, str]]) -> None:
        for shape in shapes:
            self.add(*shape)

    def add(self, gaps: list[tuple[int, bytes]], tail: int, max_tokens: int, kind: str) -> None:
        number = self.arrive()
        is_cross = kind == "cross"
        items = laid_out(gaps[:3] if is_cross else gaps, flat=is_cross)
        end = 0 if is_cross else max((i.placeholder.offset + i.placeholder.length for i in items),
                                     default=0)  # fmt: skip
        tokens = [1 + (number % 3 == 0 and at % 5 == 4) for at in range(end + tail)]
        name = f"{kind}{number % 9}"  # ids are used again, after their end
        if name in self.worker.sequences or name in self.sampled:
            name = f"{kind}{number}"
        request = Request(
            id=name,
            num_tokens=end + tail,
            max_tokens=max_tokens - (kind == "session"),
            items=items,
            cross_attention=is_cross,
            session_tokens=40 if kind == "session" else 0,
            token_ids=tokens if kind == "prompt" else (),
            share=Share(tenant="ab"[number % 7 == 0]),
        )
        try:
            self.scheduler.add(request)
        except PromptTooLong:
            most = self.limits.kv_num_blocks * self.limits.kv_block_tokens
            assert (request.session_tokens or request.num_tokens + max_tokens) > most
            return
        except EncoderCacheFull:
            keys = {i.key for i in items}
            if self.too_long_at_once(items) and not is_cross:
                return
            rows, nbytes = sum(SIZES[k] for k in keys), sum(NBYTES[k] for k in keys)
            assert is_cross
            assert rows > self.limits.cache_num_embeds or nbytes > self.limits.cache_nbytes
            return
        self.worker.add(request, number)

    @rule(
        pick=st.integers(0, 99),
        gaps=parts,
        tail=st.integers(1, 2),
        max_tokens=st.integers(0, 2),
    )
    def append(self, pick: int, gaps: list[tuple[int, bytes]], tail: int, max_tokens: int) -> None:
        sessions = [s for s in self.worker.sequences if s.startswith("session")]
        if not sessions:
            return
        session = sessions[pick % len(sessions)]
        items = laid_out(gaps[:2])
        end = items[-1].placeholder.offset + items[-1].placeholder.length if items else 0
        number = self.arrive()
        try:
            self.scheduler.append(
                session, num_tokens=end + tail, max_tokens=max_tokens, items=items
            )
        except PromptTooLong:
            return
        except EncoderCacheFull:
            assert self.too_long_at_once(items)
            return
        self.worker.sequences[session].inputs.append((end + tail, max_tokens, items, number))

    def too_long_at_once(self, items: list[EncoderInput]) -> bool:
        """Return whether an item that can't be split does not fit beside the others' decoding."""
        most_others = min(self.limits.max_num_seqs - 1, self.limits.max_step_decodes)
        most = self.limits.max_num_batched_tokens - most_others
        return not self.limits.can_split_items and any(i.placeholder.length > most for i in items)

    @rule(num_embeds=budgets, num_decodes=budgets)
    def step(self, num_embeds: int = UNLIMITED, num_decodes: int = UNLIMITED) -> None:
        """Run a step whose tokens arrive later, like the steps of a pipeline."""
        step = self.scheduler.next_step(num_embeds=num_embeds, num_decodes=num_decodes)
        assert len(step.decode) <= min(num_decodes, self.limits.most_decodes)
        rows = sum(SIZES[each.key] for each in step.encode)
        assert rows <= num_embeds or len(step.encode) == 1
        self.sampled += self.worker.do(step)
        assert self.scheduler._kept.num_blocks <= self.scheduler.num_kv_blocks_free
        kept_tokens = self.scheduler._kept.num_blocks * self.limits.kv_block_tokens
        assert kept_tokens <= self.limits.max_kept_tokens
        self.check_embeddings()
        self.check_first_in_line(step)
        if step.is_empty:
            self.check_nothing_could_run()

    @rule(is_eos=st.booleans())
    def tokens(self, is_eos: bool) -> None:
        """All chosen tokens arrive."""
        for n, sequence_id in enumerate(self.sampled):
            self.worker.token(
                self.scheduler,
                sequence_id,
                is_eos=is_eos and n % 2 == 0,
                token_id=1 + n % 2 if sequence_id.startswith("prompt") else None,
            )
        self.sampled = []

    @rule(is_eos=st.sampled_from([False, False, True]), num_steps=st.integers(1, 3))
    def run(self, is_eos: bool, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()
            self.tokens(is_eos)

    @rule(pick=st.integers(0, 999), really=st.integers(0, 2))
    def abort(self, pick: int, really: int) -> None:
        if self.worker.sequences and not really:
            self.end(list(self.worker.sequences)[pick % len(self.worker.sequences)])

    @rule(key=st.sampled_from([*SIZES, *(b"%d" % n for n in range(16))]))
    def fail_item(self, key: bytes) -> None:
        owners = self.scheduler.cache.owners(key)
        lost = self.scheduler.fail_item(key)
        assert set(lost) == owners
        for sequence_id in lost:
            self.end(sequence_id)
        self.worker.embeddings.discard(key)

    def end(self, sequence_id: str) -> None:
        self.scheduler.abort(sequence_id)
        del self.worker.sequences[sequence_id]

    # Invariants

    @invariant()
    def entries_have_owners_or_are_evictable(self) -> None:
        cache = self.scheduler.cache
        free = 0
        for key in SIZES:
            owners = cache.owners(key)
            assert all(self.scheduler.is_running(owner) for owner in owners)
            free += key in cache and not owners
        assert cache.num_evictable == free
        assert self.scheduler.num_running <= self.limits.max_num_seqs
        known = self.scheduler.num_running + self.scheduler.num_waiting
        assert known == len(self.worker.sequences)

    def check_embeddings(self) -> None:
        cached = {key for key in SIZES if key in self.scheduler.cache}
        assert self.worker.embeddings == cached, "workers hold what the scheduler thinks they do"

    def check_first_in_line(self, step: Step) -> None:
        """Check that the earliest running sequence with work is served after some steps."""
        served = {chunk.sequence_id for chunk in step.prefill} | set(step.decode)
        line = [
            (known.arrival, sequence_id)
            for sequence_id, known in self.worker.sequences.items()
            if self.scheduler.is_running(sequence_id)
            and sequence_id not in served
            and known.has_work
        ]
        first = min(line)[1] if line else ""
        before, waited = self.first_in_line
        self.first_in_line = (first, waited + 1 if first == before else 1)
        assert not first or self.first_in_line[1] <= MOST_STEPS_FOR_THE_FIRST, "it starves"

    def check_nothing_could_run(self) -> None:
        """Check an empty step: tokens are awaited, or no running sequence has work."""
        if self.sampled:
            return
        for sequence_id, known in self.worker.sequences.items():
            assert not (self.scheduler.is_running(sequence_id) and known.can_go_on)
        if self.scheduler.num_waiting:
            sessions = [s for s in self.worker.sequences if s.startswith("session")]
            assert any(self.scheduler.is_running(s) for s in sessions), "nothing holds them up"

    def teardown(self) -> None:
        """End the sessions; check that all other sequences end and that all memory is free."""
        if not hasattr(self, "scheduler"):
            return
        self.tokens(is_eos=False)
        for sequence_id in [s for s in self.worker.sequences if s.startswith("session")]:
            self.end(sequence_id)
        for _ in range(100 + 60 * len(self.worker.sequences)):
            if not self.worker.sequences:
                break
            self.step()
            self.tokens(is_eos=False)
        assert not self.worker.sequences, "somebody starved"
        self.step()
        self.step()
        scheduler = self.scheduler
        assert scheduler.next_step().is_empty
        kept = set(scheduler._kept._kept)
        assert set(self.worker.kv) == kept, "nothing is left but what is kept"
        assert scheduler.num_running == scheduler.num_waiting == 0
        assert scheduler.cache.num_evictable == len(scheduler.cache)
        assert scheduler.num_kv_blocks_free == self.limits.kv_num_blocks
        assert scheduler.kv_in_use == 0.0
        for _ in range(30):
            scheduler.next_step()
        assert not scheduler._ended


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = STATE_MACHINE
