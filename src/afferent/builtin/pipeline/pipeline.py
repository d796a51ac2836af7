"""Path of every request: its prompt to the engine, and the engine's tokens to text.

All pins of a request in the store are under its own id, and its `RequestScope` releases them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import msgspec

from afferent.builtin.pipeline.document_pages import digests_of, with_pages
from afferent.builtin.pipeline.generate import AnswerWriter, merge
from afferent.builtin.pipeline.prompt import PromptBuilder
from afferent.builtin.pipeline.prompt_ahead import Computed, PromptAhead
from afferent.builtin.pipeline.prompt_stage import PromptStage, SequencePlace
from afferent.builtin.pipeline.request import (
    End,
    GenerateRequest,
    Output,
    SamplingDefaults,
    VllmRules,
)
from afferent.builtin.pipeline.stops import StopMatcher
from afferent.engines.protocol import (
    Accepted,
    Engine,
    EngineRequest,
    Finished,
    SessionEngine,
    Submit,
    Tokens,
)
from afferent.engines.render import Renderer
from afferent.errors import (
    InternalError,
    InvalidForm,
)
from afferent.items.documents import ReadDocument
from afferent.items.stage import ItemStage
from afferent.proxy import counting
from afferent.proxy.request_scope import RequestScope
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.telemetry.registry import counter
from afferent.telemetry.trace import Trace
from afferent.types import Sampling

_PROMISE = "the engine breaks promise 1 of an engine: `Accepted` comes once, and first"


TOKENS = counter(
    "afferent_tokens_total",
    "Tokens of prompts and of answers",
    kind=("prompt", "completion"),
)


class Pipeline:
    """Runs requests against one store and one engine."""

    def __init__(
        self,
        *,
        store: AsyncDaemonStore,
        engine: Engine,
        builder: PromptBuilder,
        items: ItemStage,
        sampling: SamplingDefaults,
    ) -> None:
        self.store = store
        self.engine = engine
        self.prompts = PromptStage(engine=engine, builder=builder, items=items, sampling=sampling)
        self._builder = builder
        self._items, self.knows, self.missing = items, items.knows, items.missing
        self.heap = items.heap
        self.early, self.close = items.early.body, items.close

    @property
    def vllm_rules(self) -> VllmRules | None:
        """Rules for prompts of vLLM; ``None`` if the prompts are not for vLLM."""
        renderer = self.engine
        if not isinstance(renderer, Renderer) or not renderer.is_for_vllm:
            return None
        return VllmRules(
            merges_system=self._builder.merges_system,
            excludes_unused_tools=renderer.excludes_unused_tools,
        )

    async def run(
        self, request: GenerateRequest, own: RequestScope, place: SequencePlace | None = None
    ) -> AsyncGenerator[Output, None]:
        """Yield `PromptInfo`, then pieces of text and the `End` of each answer.

        Closing the iterator early aborts the request.

        Args:
            place: The messages extend the sequence of a session.

        Raises:
            InvalidRequest: Something in the request is invalid.
            Unavailable: Try again.
        """
        if (use := request.tool_use) is not None:
            form = msgspec.json.encode(self._builder.tool_form(use)).decode()
            request = msgspec.structs.replace(request, tools=form)
        trace = own.trace
        trace.media, trace.where = counting.media_of(request.files), "preprocess"
        request = self.prompts.with_frames(request)
        self.prompts.check(request)
        release = own.release_after(request.n)
        try:
            given = request
            if place is None:
                read, submit = await self._read_and_compute(request, trace)
            else:
                read, submit = await self.prompts.read_documents(request, trace), place.submit
            request = with_pages(request, read)
            engine_request, info = await self.prompts.engine_request(request, trace, place)
            info = replace(info, digests=digests_of(given, read, info.digests))
            trace.where = "engine"
            yield info
            answers = self._answers(request, engine_request, release, trace, submit)
            async with aclosing(merge(answers)) as outputs:
                async for output in outputs:
                    yield output
        except InvalidForm as error:  # an engine does not know the API's parameters
            raise InvalidForm(error.message, param=request.form_param) from error

    def live_engine(self) -> SessionEngine | None:
        """Return the engine, if it and the model's chat template let a sequence be extended."""
        engine, info = self.engine, self.engine.info
        has_sessions = info is not None and info.has_sessions and self._builder.can_append
        return engine if has_sessions and isinstance(engine, SessionEngine) else None

    async def hear(self, request: GenerateRequest, own: RequestScope, place: SequencePlace) -> None:
        """Extend the sequence of a session by messages without an answer.

        Raises:
            InvalidRequest: Something in the request is invalid.
            Unavailable: Try again.
        """
        try:
            engine_request, _ = await self.prompts.engine_request(request, own.trace, place)
            engine_request = msgspec.structs.replace(engine_request, has_answer=False)
            TOKENS.labels("prompt").inc(len(engine_request.token_ids))
            own.trace.num_prompt_tokens += len(engine_request.token_ids)
            await self._compute(engine_request, place.submit)
        finally:
            self.store.forget(request.request_id)

    async def _read_and_compute(
        self, request: GenerateRequest, trace: Trace
    ) -> tuple[list[ReadDocument], Submit]:
        """Read the documents of a request while the engine computes the prompt's beginning.

        Returns:
            The documents, and what submits the request.
        """
        if self.engine.info is None or not (self.engine.info.num_kept_tokens and request.documents):
            return await self.prompts.read_documents(request, trace), self.engine.submit
        ahead = PromptAhead(request, partial(self._compute_beginning, trace))
        try:
            async with ahead.running():
                read = await self.prompts.read_documents(request, trace, ahead.begun)
                start_ns = time.monotonic_ns()
        finally:
            trace.num_prompt_tokens = ahead.num_new  # also of a request that fails now
        if ahead.num_new:
            trace.stage(start_ns, "wait_for_beginning", note=f"{ahead.num_new} tokens")
        return read, partial(ahead.submit, self.engine)

    async def _compute_beginning(self, trace: Trace, request: GenerateRequest) -> Computed | None:
        """Have the engine compute messages up to their last item, for a request that begins so.

        Args:
            request: Its items are those that are known by their digests.

        Returns:
            ``None`` if the engine would not keep it, or features are gone.

        Raises:
            InvalidRequest: Something in the request is invalid.
            Unavailable: Try again.
        """
        inner, info = Trace(trace.request_id, trace.what), self.engine.info
        self.store.introduce(request.request_id, request.share)
        try:
            if info is None or await self._items.missing(request.items):
                return None
            asked, _ = await self.prompts.engine_request(request, inner, is_ahead=True)
            end = max(item.placeholder.offset + item.placeholder.length for item in asked.items)
            if end > info.num_kept_tokens:
                return None
            # An engine may know no requests without an answer: one token is the shortest.
            asked = msgspec.structs.replace(
                asked, token_ids=asked.token_ids[:end], sampling=Sampling(max_tokens=1)
            )
            return Computed(end, await self._compute(asked, self.engine.submit))
        finally:
            self.store.forget(request.request_id)

    async def _compute(self, request: EngineRequest, submit: Submit) -> int:
        """Have the engine compute a prompt for its KV cache alone.

        Returns:
            The number of its tokens whose KV cache was there already.
        """
        num_cached = 0
        async with aclosing(submit(request)) as events:
            async for event in events:
                match event:
                    case Accepted():  # the engine has its own pins
                        self.store.forget(request.request_id)
                    case Tokens(num_cached=number) | Finished(num_cached=number):
                        num_cached += number
        return num_cached

    def _answers(
        self,
        request: GenerateRequest,
        engine_request: EngineRequest,
        release: Callable[[], None],
        trace: Trace,
        submit: Submit,
    ) -> list[AsyncGenerator[Output, None]]:
        """Submit one engine request for each answer; all share the same items."""
        TOKENS.labels("prompt").inc(len(engine_request.token_ids))
        trace.num_prompt_tokens = len(engine_request.token_ids)
        return [
            self._generate(
                msgspec.structs.replace(
                    engine_request,
                    request_id=f"{request.request_id}-{index}" if index else request.request_id,
                    sampling=_sampling_of(engine_request.sampling, index),
                    answer_of=request.request_id if request.n > 1 else "",
                    num_answers=request.n,
                ),
                self._writer(request, engine_request, index),
                release,
                trace,
                submit,
            )
            for index in range(request.n)
        ]

    def _writer(
        self, request: GenerateRequest, engine_request: EngineRequest, index: int
    ) -> AnswerWriter:
        return AnswerWriter(
            index,
            engine_request.start + len(engine_request.token_ids),
            self._builder.detokenizer(
                skips_special=request.skips_special and request.tool_use is None
            ),
            StopMatcher(request.stop, request.includes_stop),
            request.logprobs.write if request.logprobs is not None else None,
            engine_request.sampling.min_tokens,
            engine_request.sampling.stop_token_ids,
            self._builder.call_reader(request.tool_use, index),
        )

    async def _generate(
        self,
        engine_request: EngineRequest,
        writer: AnswerWriter,
        release: Callable[[], None],
        trace: Trace,
        submit: Submit,
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of one answer.

        Raises:
            InternalError: The engine does not send `Accepted` exactly once, and first.
        """
        start_ns, times = time.monotonic_ns(), counting.AnswerTimes(trace)
        is_accepted = False
        try:
            async with aclosing(submit(engine_request)) as events:
                async for event in events:
                    if isinstance(event, Accepted) is is_accepted:
                        raise InternalError(_PROMISE)
                    match event:
                        case Accepted():
                            is_accepted = True
                            release()
                            continue
                        case Tokens(token_ids, spans):
                            times.tokens(len(token_ids), now_ns=time.monotonic_ns())
                            trace.add(spans)
                            if writer.num_tokens == 0:
                                trace.stage(start_ns, "first_token")
                            outputs = writer.feed(event)
                        case Finished(_, spans):
                            trace.add(spans)
                            outputs = writer.finish(event)
                    for output in outputs:
                        yield output
                    if outputs and isinstance(outputs[-1], End):
                        return
        finally:
            times.end()
            TOKENS.labels("completion").inc(writer.num_tokens)
            trace.num_answer_tokens += writer.num_tokens


def _sampling_of(sampling: Sampling, index: int) -> Sampling:
    """Return sampling with a seed of its own for each answer: they differ and are reproducible."""
    if sampling.seed is None or index == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=sampling.seed + index)
