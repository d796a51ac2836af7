"""Requests of one group of workers, from acceptance to the last token, step by step.

A step goes out in two halves if it has items to encode, or if it has new sequences and there are
several workers. Work that fails on one worker has then failed its requests on all workers before
any of them computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from afferent.builtin.engine import messages as m
from afferent.builtin.engine.asked_form import form_of
from afferent.builtin.engine.core.forms import Forms
from afferent.builtin.engine.core.pins import Grids, Pins, Wanted
from afferent.builtin.engine.core.ranks import Ranks
from afferent.builtin.engine.core.step_budget import ALONE_S, STEP_S, StepBudget
from afferent.engines.protocol import Chosen, EngineRequest, EngineStats
from afferent.engines.remote import messages as remote
from afferent.errors import AfferentError, ConnectionClosed, FormatError, InternalError, WorkerDied
from afferent.runtime import wire
from afferent.schedule.scheduler import Scheduler
from afferent.schedule.step import EncoderInput, Limits, Request, Reuse, Step
from afferent.types import Failure, Sampling, Span, encode, span_since

log = logging.getLogger(__name__)

_LEAST_DECODES: Final = 16
"""Least number of answers in a step, where more sequences have answers to write."""


@dataclass(slots=True, eq=False)
class _Running:
    """Request between its submission and its end."""

    request: EngineRequest
    frontend: wire.AsyncChannel
    submitted_ns: int
    grids: list[Grids] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    decode_start_ns: int = 0
    form_nbytes: int = 0
    has_begun: bool = False
    is_pinned: bool = False
    num_cached: int = 0
    """Positions of its prompt that were computed for an earlier request; 0 once it is reported."""
    num_let_go: int = 0
    """Number of items that are unpinned, from the first on."""

    def reply(self, event: remote.RequestEvent) -> None:
        """Send an event to the frontend, if it is still connected."""
        with contextlib.suppress(ConnectionClosed):
            self.frontend.send(encode(event))


class EngineLoop:
    """Runs requests: they come by `submit` and go by `abort`; `run` does the steps.

    Invariants:
        - A request is in ``_requests`` from `submit` until it finishes, fails, or is aborted.
        - A request that leaves ``_requests`` is unpinned.
        - One step runs at a time; all workers get the same `Work`.
        - The frontend gets exactly one of `RequestFinished` and `RequestFailed`, unless it aborts.
    """

    def __init__(
        self, ranks: Ranks, pins: Pins, forms: Forms, limits: Limits, stats: EngineStats
    ) -> None:
        """Create a loop without requests; it counts in ``stats``."""
        self._ranks, self._pins, self._forms, self._stats = ranks, pins, forms, stats
        self._info = ranks.info
        self._scheduler = Scheduler(limits)
        self._row_budget = StepBudget(1)
        self._decode_budget = StepBudget(limits.most_decodes)
        self._limit_decodes = limits.most_decodes
        self._requests: dict[str, _Running] = {}
        self._finished: list[str] = []
        self._numbers = itertools.count(1)
        self._stirred = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # Events

    def submit(self, request: EngineRequest, frontend: wire.AsyncChannel) -> None:
        """Add a new request; its frontend gets all of its events.

        Raises:
            FormatError: Its id is in use.
        """
        if request.request_id in self._requests:
            raise FormatError("a request id is used twice")
        sampling = _with_seed(request.sampling)
        request = msgspec.structs.replace(request, sampling=sampling)
        run = _Running(request, frontend, time.monotonic_ns())
        self._requests[request.request_id] = run
        self._spawn(self._accept(run))

    def abort(self, request_id: str) -> None:
        """Drop a request that no frontend waits for; ignore unknown ones."""
        self._scheduler.abort(request_id)
        run = self._requests.pop(request_id, None)
        if run is not None:
            self._let_go(run)
        self._stirred.set()

    def abort_all(self, frontend: wire.AsyncChannel) -> None:
        """Abort all requests of a lost frontend."""
        for request_id in [r for r, run in self._requests.items() if run.frontend is frontend]:
            self.abort(request_id)

    def fail_all(self, error: AfferentError) -> None:
        """Fail all requests: the workers are lost."""
        for request_id in list(self._requests):
            self._fail(request_id, error)
        self._scheduler.clear()

    def update_stats(self) -> None:
        """Update the statistics that are not counted at each event."""
        self._stats.num_running = self._scheduler.num_running
        self._stats.num_waiting = self._scheduler.num_waiting
        self._stats.cache_nbytes = self._scheduler.cache.used_nbytes
        self._stats.kv_in_use = self._scheduler.kv_in_use

    async def run(self) -> None:
        """Do steps until the workers are lost."""
        try:
            while True:
                step = self._next_step()
                if step.is_empty:
                    self._stirred.clear()
                    await self._stirred.wait()
                else:
                    await self._do(step)
        except WorkerDied:
            return  # `fail_all` is called by the code that ended the workers
        except Exception:
            log.exception("a step failed")
            self._ranks.end()

    # Acceptance

    async def _accept(self, run: _Running) -> None:
        """Pin the items here, so that the frontend can unpin them."""
        request = run.request
        try:
            if (form := form_of(request.sampling)) is not None:
                start_ns = time.monotonic_ns()
                run.form_nbytes = await self._forms.check(form, request.share)
                run.spans.append(span_since(start_ns, "core", "form"))
            if request.items:
                rows_of, row_nbytes = self._ranks.weights, self._info.embed_nbytes
                await self._pins.fetch(request, weights=rows_of, row_nbytes=row_nbytes)
                run.grids = await self._pins.hold(request)
                run.is_pinned = True
            if self._requests.get(request.request_id) is not run:  # aborted meanwhile
                self._let_go(run)
                return
            self._scheduler.add(self._as_scheduled(request))
        except AfferentError as error:
            self._fail(request.request_id, error)
            return
        except Exception:
            log.exception("a request could not be accepted")
            self._fail(request.request_id, InternalError("unexpected"))
            return
        count = len(request.items)
        note = f"{count} pin{'s' if count > 1 else ''}" if count else ""
        run.spans.append(span_since(run.submitted_ns, "core", "accept", note=note))
        run.reply(remote.RequestAccepted(request.request_id))
        self._stirred.set()

    def _as_scheduled(self, request: EngineRequest) -> Request:
        row_nbytes = self._info.embed_nbytes
        return Request(
            id=request.request_id,
            num_tokens=len(request.token_ids),
            max_tokens=request.sampling.max_tokens,
            items=[
                EncoderInput(item.key, item.placeholder, item.placeholder.length * row_nbytes)
                for item in request.items
            ],
            share=request.share,
            answer_of=request.answer_of,
            num_answers=request.num_answers,
            cross_attention=self._info.cross_attention,
            token_ids=() if self._info.cross_attention else request.token_ids,
        )

    # Steps

    def _next_step(self) -> Step:
        is_alone = self._scheduler.num_running + self._scheduler.num_waiting <= 1
        return self._scheduler.next_step(
            num_embeds=self._row_budget.num_within(ALONE_S if is_alone else STEP_S),
            num_decodes=self._most_decodes,
        )

    @property
    def _most_decodes(self) -> int:
        within = max(_LEAST_DECODES, self._decode_budget.num_within(STEP_S))
        return min(within, self._limit_decodes)  # else a full step of a fast engine is not measured

    async def _do(self, step: Step) -> None:
        self._stats.num_steps += 1
        drop, evict = step.drop, step.evict
        begin = [self._begin(chunk.sequence_id) for chunk in step.prefill if chunk.start == 0]
        begin += [self._begin(reuse.sequence_id, reuse) for reuse in step.reuse]
        if step.encode or (begin and self._ranks.may_differ):
            failed = await self._prepare(step, begin)
            # Some workers may have embeddings that others failed to compute.
            drop, evict, begin = [], list(failed), []
            for key, failure in failed.items():
                self._fail_item(step, key, failure)
        self._let_go_of_encoded(step)
        prefill = [chunk for chunk in step.prefill if chunk.sequence_id in self._requests]
        decode = [sequence_id for sequence_id in step.decode if sequence_id in self._requests]
        if not (drop or evict or begin or prefill or decode):
            return
        work = m.Work(
            next(self._numbers),
            drop=drop,
            evict=evict,
            begin=begin,
            prefill=prefill,
            decode=decode,
            finished=self._take_finished(),
        )
        self._stats.num_prompt_tokens += sum(chunk.num_tokens for chunk in prefill)
        self._stats.num_decode_tokens += len(decode)
        start_s = time.monotonic()
        answers = await self._ranks.do(work)
        if not prefill and len(decode) >= self._most_decodes:
            self._decode_budget.measured(len(decode), time.monotonic() - start_s)
        self._take(work, answers)

    def _take_finished(self) -> list[str]:
        finished, self._finished = self._finished, []
        return finished

    async def _prepare(self, step: Step, begin: list[m.Begin]) -> dict[bytes, Failure]:
        """Do the first half of a step; return the items that failed, by key."""
        lease = self._pins.new_lease() if step.encode else ""
        wanted = [
            Wanted(each.sequence_id, self._requests[each.sequence_id].request.items[each.item])
            for each in step.encode
        ]
        try:
            held = await self._pins.hold_step(
                lease, wanted, weights=self._ranks.weights, clients=self._ranks.clients
            )
            work = m.Work(
                next(self._numbers),
                drop=step.drop,
                evict=step.evict,
                finished=self._take_finished(),
                lease=lease,
                pinned_for=held.pinned_for,
                encode=held.items,
                begin=begin,
            )
            start_s = time.monotonic()
            answers = await self._ranks.do(work)
            self._row_budget.measured(_num_rows(wanted, held.items), time.monotonic() - start_s)
        finally:
            if lease:
                self._pins.let_go(lease)
        self._count(answers)
        self._stats.num_embeddings_found += sum(item.found for item in held.items)
        self._fail_sequences(answers)
        failed = held.failed
        for answer in answers:
            failed |= dict(answer.failed_items)
        return failed

    def _begin(self, sequence_id: str, reuse: Reuse | None = None) -> m.Begin:
        run = self._requests[sequence_id]
        self._stats.num_preempted += run.has_begun
        if reuse is not None:
            self._stats.num_cached_tokens += reuse.num_tokens
            run.num_cached = 0 if run.has_begun else reuse.num_tokens
        run.has_begun = True
        items = [
            m.BegunItem(item.modality, item.key, item.placeholder, grids)
            for item, grids in zip(run.request.items, run.grids, strict=True)
        ]
        token_ids = run.request.token_ids + run.answer
        return m.Begin(
            sequence_id,
            token_ids,
            items,
            run.request.sampling,
            len(run.answer),
            run.form_nbytes,
            reuse,
        )

    def _take(self, work: m.Work, answers: list[m.WorkDone]) -> None:
        """Process the chosen tokens; all workers have chosen the same ones."""
        self._count(answers)
        self._fail_sequences(answers)
        chosen = {choice.sequence_id: choice for choice in answers[0].chosen}
        sampled = [chunk.sequence_id for chunk in work.prefill if chunk.samples]
        for sequence_id in [*sampled, *work.decode]:
            run = self._requests.get(sequence_id)
            if run is None:
                continue
            if (choice := chosen.get(sequence_id)) is None:
                self._fail(sequence_id, InternalError("the engine chose no token"))
            else:
                self._on_token(run, choice)

    def _count(self, answers: list[m.WorkDone]) -> None:
        counts = [answer.num_encoded for answer in answers]
        before = self._stats.num_encoded or [0] * len(counts)
        self._stats.num_encoded = [a + b for a, b in zip(before, counts, strict=True)]
        for sequence_id, span in answers[0].spans:
            if sequence_id in self._requests:
                self._requests[sequence_id].spans.append(span)

    def _on_token(self, run: _Running, choice: Chosen) -> None:
        request, token = run.request, choice.token_id
        is_eos = self._ends(token, request.sampling)
        reason = self._scheduler.record(request.request_id, is_eos=is_eos, token_id=token)
        if not run.answer:
            run.decode_start_ns = time.monotonic_ns()
        run.answer.append(token)
        num_cached, run.num_cached = run.num_cached, 0
        if not is_eos:
            spans, run.spans = run.spans, []
            logprobs = [choice.logprobs] if choice.logprobs is not None else []
            tokens = remote.RequestTokens(request.request_id, [token], spans, logprobs, num_cached)
            run.reply(tokens)
            num_cached = 0
        if reason is not None:
            note = f"{len(run.answer) - 1} more tokens"
            span = span_since(run.decode_start_ns, "worker", "decode_tokens", note=note)
            run.spans.append(msgspec.structs.replace(span, pid=self._ranks.pid))
            last = token if is_eos else None
            finished = remote.RequestFinished(
                request.request_id, reason.value, run.spans, last, num_cached
            )
            run.reply(finished)
            self._finished.append(request.request_id)
            del self._requests[request.request_id]
            self._let_go(run)

    def _ends(self, token: int, sampling: Sampling) -> bool:
        """Whether this token is the end of an answer."""
        is_eos = token in self._info.eos_token_ids and not sampling.ignore_eos
        return is_eos or token in sampling.stop_token_ids

    # Ends

    def _fail_item(self, step: Step, key: bytes, failure: Failure) -> None:
        """Fail all requests that use this item in the scheduler, or compute with it in this
        step.
        """
        lost = dict.fromkeys(self._scheduler.fail_item(key))
        for sequence_id in _in_prompts(step):
            run = self._requests.get(sequence_id)
            if run is not None and any(item.key == key for item in run.request.items):
                lost[sequence_id] = None
        for sequence_id in lost:
            self._fail(sequence_id, failure)

    def _fail(self, request_id: str, error: AfferentError | Failure) -> None:
        self._scheduler.abort(request_id)
        run = self._requests.pop(request_id, None)
        if run is None:
            return
        if isinstance(error, AfferentError):
            error = Failure(error.code, error.message)
        run.reply(remote.RequestFailed(request_id, error))
        self._let_go(run)

    def _fail_sequences(self, answers: list[m.WorkDone]) -> None:
        for answer in answers:
            for sequence_id, failure in answer.failed_sequences:
                self._fail(sequence_id, failure)

    def _let_go_of_encoded(self, step: Step) -> None:
        """Unpin features whose embeddings exist."""
        for sequence_id in _in_prompts(step):
            run = self._requests.get(sequence_id)
            # A preempted sequence has no items any more.
            if run is None or not self._scheduler.is_running(sequence_id):
                continue
            items, number = run.request.items, self._scheduler.num_items_acquired(sequence_id)
            if number == len(items):
                self._let_go(run)
            elif run.is_pinned and number > run.num_let_go:
                encoded = [item.handle for item in items[run.num_let_go : number]]
                self._pins.let_go_of(sequence_id, encoded)
                run.num_let_go = number

    def _let_go(self, run: _Running) -> None:
        if run.is_pinned:
            run.is_pinned = False
            self._pins.let_go(run.request.request_id)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _num_rows(wanted: Sequence[Wanted], items: Sequence[m.EncodeItem]) -> int:
    """Return the rows that a step encodes, without those that were found."""
    made = {item.key for item in items if not item.found}
    return sum(each.item.placeholder.length for each in wanted if each.item.key in made)


def _in_prompts(step: Step) -> list[str]:
    """Return the sequences whose prompts, or items of them, are computed in a step; each once."""
    encoded = [each.sequence_id for each in step.encode]
    return list(dict.fromkeys([*encoded, *(chunk.sequence_id for chunk in step.prefill)]))


def _with_seed(sampling: Sampling) -> Sampling:
    """Add a seed: all workers draw alike, and a request that begins again continues as before."""
    if sampling.seed is not None:
        return sampling
    return msgspec.structs.replace(sampling, seed=secrets.randbits(63))
