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
from afferent.engines.protocol import Chosen, EngineRequest, EngineStats, KeptSession
from afferent.engines.remote import messages as remote
from afferent.errors import (
    AfferentError,
    ConnectionClosed,
    FormatError,
    InternalError,
    SessionLost,
    WorkerDied,
)
from afferent.runtime import wire
from afferent.schedule.scheduler import Scheduler
from afferent.schedule.step import EncoderInput, FinishReason, Limits, Request, Reuse, Step
from afferent.types import Failure, Item, Sampling, Span, encode, span_since

log = logging.getLogger(__name__)

KEEP_SESSION_S: Final = 60.0
"""For so long, the sequence of a session stays without a client; less if memory is short."""
_LEAST_DECODES: Final = 16
"""Least number of answers in a step, where more sequences have answers to write."""


@dataclass(slots=True, eq=False)
class _Running:
    """Request between its submission and its end."""

    request: EngineRequest
    frontend: wire.AsyncChannel
    submitted_ns: int
    sequence_id: str
    """The request's own id; of a session, that of the request that began its sequence."""
    first_item: int = 0
    """Ordinal of its first item in the sequence."""
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

    def item(self, ordinal: int) -> Item:
        """Return an item by its ordinal in the sequence."""
        return self.request.items[ordinal - self.first_item]

    def begun_items(self) -> list[m.BegunItem]:
        return [
            m.BegunItem(item.modality, item.key, item.placeholder, grids)
            for item, grids in zip(self.request.items, self.grids, strict=True)
        ]

    def reply(self, event: remote.RequestEvent) -> None:
        """Send an event to the frontend, if it is still connected."""
        with contextlib.suppress(ConnectionClosed):
            self.frontend.send(encode(event))


@dataclass(slots=True, eq=False)
class _Session:
    """Sequence that stays between the requests of a session.

    Attributes:
        sequence_id: A new one each time that the session begins: a step that runs is never about
            another sequence of the same name.
        num_tokens: Tokens that it has; those of a request that runs are added at its end.
        num_items: Items that it has had.
        mark: The frontend's note about it, and the token that ended its last answer.
        ending: The end of a session that no client uses.
    """

    sequence_id: str
    frontend: wire.AsyncChannel
    num_tokens: int = 0
    num_items: int = 0
    is_idle: bool = False
    mark: bytes = b""
    end_token: int | None = None
    ending: asyncio.TimerHandle | None = None


class EngineLoop:
    """Runs requests: they come by `submit` and go by `abort`; `run` does the steps.

    Invariants:
        - A request is in ``_requests`` from `submit` until it finishes, fails, or is aborted, under
          the id of its sequence.
        - A session is in ``_sessions``, in the order of last use, exactly if its sequence is in the
          scheduler, or is about to be.
        - A request that leaves ``_requests`` is unpinned.
        - One step runs at a time; all workers get the same `Work`.
        - The frontend gets exactly one of `RequestFinished` and `RequestFailed`, unless it aborts.
    """

    def __init__(
        self, ranks: Ranks, pins: Pins, forms: Forms, limits: Limits, stats: EngineStats
    ) -> None:
        """Create a loop without requests; it counts in ``stats``."""
        self._ranks, self._pins, self._forms, self._stats = ranks, pins, forms, stats
        self._info = self.info = ranks.info
        if not self._info.cross_attention:
            # A block is kept as a whole, and the answer's token needs one, too.
            num_kept = max(0, limits.max_kept_tokens - 2 * limits.kv_block_tokens)
            self.info = msgspec.structs.replace(self._info, num_kept_tokens=num_kept)
        self._scheduler = Scheduler(limits)
        self._row_budget = StepBudget(1)
        self._decode_budget = StepBudget(limits.most_decodes)
        self._limit_decodes = limits.most_decodes
        self._requests: dict[str, _Running] = {}
        self._finished: list[str] = []
        self._sessions: dict[str, _Session] = {}
        self._sequence_of: dict[str, str] = {}  # of requests that extend a session
        self._numbers = itertools.count(1)
        self._stirred = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # Events

    def submit(self, request: EngineRequest, frontend: wire.AsyncChannel) -> None:
        """Add a new request; its frontend gets all of its events.

        Raises:
            FormatError: Its id is in use.
        """
        if request.request_id in self._requests or request.request_id in self._sequence_of:
            raise FormatError("a request id is used twice")
        sampling = _with_seed(request.sampling)
        request = msgspec.structs.replace(request, sampling=sampling)
        run = _Running(request, frontend, time.monotonic_ns(), request.request_id)
        if request.session_id:
            try:
                self._enter_session(run)
            except SessionLost as error:
                failure = Failure(error.code, error.message)
                run.reply(remote.RequestFailed(request.request_id, failure))
                return
        self._requests[run.sequence_id] = run
        self._spawn(self._accept(run))

    def end_session(self, session_id: str, frontend: wire.AsyncChannel) -> None:
        """Release the sequence of a session, after a while unless an answer is written; ignore
        unknown ones, and those that another frontend continues.

        So a client that comes back by another connection continues it.
        """
        session = self._sessions.get(session_id)
        if session is None or session.ending is not None or session.frontend is not frontend:
            return
        run = self._requests.get(session.sequence_id)
        if run is not None and run.request.has_answer:
            self.abort(session.sequence_id)
        else:
            later = asyncio.get_running_loop().call_later
            session.ending = later(KEEP_SESSION_S, self.abort, session.sequence_id)

    def find_session(self, session_id: str) -> KeptSession | None:
        """Return the sequence of a session that no request extends."""
        session = self._sessions.get(session_id)
        if session is None or not session.is_idle:
            return None
        return KeptSession(session.num_tokens, session.mark, session.end_token)

    def abort(self, request_id: str) -> None:
        """Drop a request that no frontend waits for; ignore unknown ones."""
        sequence_id = self._sequence_of.pop(request_id, request_id)
        self._scheduler.abort(sequence_id)
        run = self._requests.pop(sequence_id, None)
        if run is not None:
            self._sequence_of.pop(run.request.request_id, None)
            self._let_go(run)
        self._leave_session(sequence_id)
        self._stirred.set()

    def abort_all(self, frontend: wire.AsyncChannel) -> None:
        """Abort all requests of a lost frontend but those that only extend a session."""
        running = [run for run in self._requests.values() if run.frontend is frontend]
        for run in running:
            if run.request.has_answer:
                self.abort(run.sequence_id)
        for session_id in [s for s, each in self._sessions.items() if each.frontend is frontend]:
            self.end_session(session_id, frontend)

    def fail_all(self, error: AfferentError) -> None:
        """Fail all requests: the workers are lost."""
        for request_id in list(self._requests):
            self._fail(request_id, error)
        self._sessions.clear()
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
                run.is_pinned = True
                run.grids = await self._pins.hold(request)
            if self._requests.get(run.sequence_id) is not run:  # aborted meanwhile
                self._leave_pins(run)
                return
            self._schedule(run)
        except AfferentError as error:
            self._refuse(run, error)
            return
        except Exception:
            log.exception("a request could not be accepted")
            self._refuse(run, InternalError("unexpected"))
            return
        count = len(request.items)
        note = f"{count} pin{'s' if count > 1 else ''}" if count else ""
        run.spans.append(span_since(run.submitted_ns, "core", "accept", note=note))
        run.reply(remote.RequestAccepted(request.request_id))
        self._stirred.set()

    def _refuse(self, run: _Running, error: AfferentError) -> None:
        """Fail a request that can't be accepted, unless it was aborted meanwhile."""
        if self._requests.get(run.sequence_id) is run:
            self._fail(run.sequence_id, error)
        else:
            self._leave_pins(run)

    def _leave_pins(self, run: _Running) -> None:
        """Release the pins of a request that was aborted.

        They have the name of the request: if it has come again, its next attempt releases them.
        """
        request_id = run.request.request_id
        again = self._requests.get(self._sequence_of.get(request_id, request_id))
        if again is not None:
            again.is_pinned = True
        elif run.request.items:  # perhaps some were pinned after the abort has released the others
            self._pins.let_go(request_id)

    def _schedule(self, run: _Running) -> None:
        request, row_nbytes = run.request, self._info.embed_nbytes
        items = [
            EncoderInput(item.key, item.placeholder, item.placeholder.length * row_nbytes)
            for item in request.items
        ]
        is_alone = bool(request.session_id) or self._info.cross_attention
        num_tokens = len(request.token_ids)
        max_tokens = request.sampling.max_tokens if request.has_answer else 0
        if request.start:
            self._scheduler.append(
                run.sequence_id, num_tokens=num_tokens, max_tokens=max_tokens, items=items
            )
            return
        self._scheduler.add(
            Request(
                id=run.sequence_id,
                num_tokens=num_tokens,
                max_tokens=max_tokens,
                items=items,
                session_tokens=self._info.max_model_len if request.session_id else 0,
                share=request.share,
                answer_of=request.answer_of,
                num_answers=request.num_answers,
                cross_attention=self._info.cross_attention,
                token_ids=() if is_alone else request.token_ids,
            )
        )

    # Sessions

    def _enter_session(self, run: _Running) -> None:
        """Begin a session, or extend it.

        Raises:
            SessionLost: It has not as many tokens as the request expects, or is in use.
        """
        request = run.request
        session_id, session = request.session_id, self._sessions.get(request.session_id)
        if not request.start:
            if session is not None:
                lost = SessionLost("another connection continues this session")
                self._fail(session.sequence_id, lost)
            session = _Session(run.sequence_id, run.frontend)
        elif session is None or not session.is_idle or session.num_tokens != request.start:
            raise SessionLost("the engine has not kept this session; begin it again")
        else:
            run.sequence_id, run.first_item = session.sequence_id, session.num_items
            self._sequence_of[request.request_id] = session.sequence_id
        if session.ending is not None:
            session.ending.cancel()
        session.is_idle, session.ending, session.frontend = False, None, run.frontend
        session.num_items += len(request.items)
        self._sessions.pop(session_id, None)
        self._sessions[session_id] = session  # the most recently used

    def _rest_session(self, run: _Running, end_token: int | None) -> None:
        """Note the end of a session's request."""
        request = run.request
        self._sequence_of.pop(request.request_id, None)
        session = self._sessions.get(request.session_id)
        if session is not None and session.sequence_id == run.sequence_id:
            session.num_tokens = request.start + len(request.token_ids) + len(run.answer)
            session.is_idle, session.mark, session.end_token = True, request.mark, end_token

    def _leave_session(self, sequence_id: str) -> None:
        """Forget the session of a sequence that has ended."""
        for session_id, session in self._sessions.items():
            if session.sequence_id == sequence_id:
                del self._sessions[session_id]
                return

    def _end_idle_session(self) -> bool:
        """End the session that was not used for the longest time; return whether there was one."""
        for session in self._sessions.values():
            if session.is_idle:
                self.abort(session.sequence_id)
                return True
        return False

    # Steps

    def _next_step(self) -> Step:
        scheduler = self._scheduler
        is_alone = scheduler.num_running + scheduler.num_waiting <= 1
        while True:
            step = scheduler.next_step(
                num_embeds=self._row_budget.num_within(ALONE_S if is_alone else STEP_S),
                num_decodes=self._most_decodes,
            )
            # The memory of idle sessions is for the requests that wait.
            has_freed = scheduler.is_held_up and self._end_idle_session()
            if not (has_freed and step.is_empty):
                return step

    @property
    def _most_decodes(self) -> int:
        within = max(_LEAST_DECODES, self._decode_budget.num_within(STEP_S))
        return min(within, self._limit_decodes)  # else a full step of a fast engine is not measured

    async def _do(self, step: Step) -> None:
        self._stats.num_steps += 1
        drop, evict = step.drop, step.evict
        begin = [self._begin(chunk.sequence_id) for chunk in step.prefill if chunk.start == 0]
        begin += [self._begin(reuse.sequence_id, reuse) for reuse in step.reuse]
        extend = [
            self._extend(placed.sequence_id)
            for placed in step.placed
            if placed.sequence_id in self._requests
        ]
        if step.encode or ((begin or extend) and self._ranks.may_differ):
            failed = await self._prepare(step, begin, extend)
            # Some workers may have embeddings that others failed to compute.
            drop, evict, begin, extend = [], list(failed), [], []
            for key, failure in failed.items():
                self._fail_item(step, key, failure)
        self._let_go_of_encoded(step)
        prefill = [chunk for chunk in step.prefill if chunk.sequence_id in self._requests]
        decode = [sequence_id for sequence_id in step.decode if sequence_id in self._requests]
        if not (drop or evict or begin or extend or prefill or decode):
            return
        work = m.Work(
            next(self._numbers),
            drop=drop,
            evict=evict,
            begin=begin,
            extend=extend,
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

    async def _prepare(
        self, step: Step, begin: list[m.Begin], extend: list[m.Extend]
    ) -> dict[bytes, Failure]:
        """Do the first half of a step; return the items that failed, by key."""
        lease = self._pins.new_lease() if step.encode else ""
        wanted = [
            Wanted(each.sequence_id, self._requests[each.sequence_id].item(each.item))
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
                extend=extend,
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
        token_ids = run.request.token_ids + run.answer
        return m.Begin(
            sequence_id,
            token_ids,
            run.begun_items(),
            run.request.sampling,
            len(run.answer),
            run.form_nbytes,
            run.request.has_answer,
            reuse,
        )

    def _extend(self, sequence_id: str) -> m.Extend:
        run = self._requests[sequence_id]
        request, items = run.request, run.begun_items()
        run.num_cached = request.start
        self._stats.num_cached_tokens += request.start
        given = (sequence_id, request.token_ids, items, request.sampling)
        return m.Extend(*given, run.form_nbytes, request.has_answer)

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
        for chunk in work.prefill:
            run = self._requests.get(chunk.sequence_id)
            if run is not None and not run.request.has_answer:
                self._on_heard(run, chunk.start + chunk.num_tokens)

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
        reason = self._scheduler.record(run.sequence_id, is_eos=is_eos, token_id=token)
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
            self._finish(run, reason, token if is_eos else None, num_cached)

    def _on_heard(self, run: _Running, num_computed: int) -> None:
        """Finish a request without an answer when its prompt is computed."""
        if num_computed == run.request.start + len(run.request.token_ids):
            self._finish(run, FinishReason.STOP, None, run.num_cached)

    def _finish(
        self, run: _Running, reason: FinishReason, last: int | None, num_cached: int
    ) -> None:
        request = run.request
        self._finished.append(run.sequence_id)
        del self._requests[run.sequence_id]
        self._let_go(run)
        if request.session_id:
            self._rest_session(run, last)
        finished = remote.RequestFinished(
            request.request_id, reason.value, run.spans, last, num_cached
        )
        run.reply(finished)

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

    def _fail(self, sequence_id: str, error: AfferentError | Failure) -> None:
        self._scheduler.abort(sequence_id)
        self._leave_session(sequence_id)
        run = self._requests.pop(sequence_id, None)
        if run is None:
            return
        if isinstance(error, AfferentError):
            error = Failure(error.code, error.message)
        self._sequence_of.pop(run.request.request_id, None)
        run.reply(remote.RequestFailed(run.request.request_id, error))
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
            items = run.request.items
            number = self._scheduler.num_items_acquired(sequence_id) - run.first_item
            if number == len(items):
                self._let_go(run)
            elif run.is_pinned and number > run.num_let_go:
                encoded = [item.handle for item in items[run.num_let_go : number]]
                self._pins.let_go_of(run.request.request_id, encoded)
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
