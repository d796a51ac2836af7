"""Path of every request: media to handles, messages to tokens, tokens to text.

All pins of a request in the store are under its own id, and its `RequestScope` releases them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from afferent.builtin.pipeline import capabilities
from afferent.builtin.pipeline.document_pages import digests_of, with_frames, with_pages
from afferent.builtin.pipeline.generate import AnswerWriter, merge
from afferent.builtin.pipeline.prompt import Prompt, PromptBuilder
from afferent.builtin.pipeline.prompt_ahead import Computed, PromptAhead
from afferent.builtin.pipeline.request import (
    CallPart,
    End,
    GenerateRequest,
    Message,
    Output,
    PromptInfo,
    Rendered,
    RenderedItem,
    SamplingDefaults,
    TemplateOptions,
    TextPart,
    Truncation,
    VllmRules,
)
from afferent.builtin.pipeline.stops import StopMatcher
from afferent.engines.protocol import (
    Accepted,
    Engine,
    EngineInfo,
    EngineRequest,
    Finished,
    SessionEngine,
    Submit,
    Tokens,
)
from afferent.engines.render import Renderer
from afferent.errors import (
    EngineUnavailable,
    InternalError,
    InvalidForm,
    InvalidRequest,
    Param,
    PromptTooLong,
)
from afferent.items.documents import ReadDocument
from afferent.items.item import ReceivedItem
from afferent.items.request import ItemRequest, MediaPart
from afferent.items.stage import ItemStage
from afferent.media.families.plan import Prompt as ItemPrompt
from afferent.proxy import counting
from afferent.proxy.request_scope import RequestScope
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.telemetry.registry import counter
from afferent.telemetry.trace import Trace
from afferent.types import Item, Modality, Sampling

_LONG_TEXT = 8_000  # characters; longer texts are templated and tokenized in a thread
_PART_CHARACTERS = 8  # minimum cost of a message or part, in characters
_PROMISE = "the engine breaks promise 1 of an engine: `Accepted` comes once, and first"


TOKENS = counter(
    "afferent_tokens_total",
    "Tokens of prompts and of answers",
    kind=("prompt", "completion"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePlace:
    """End of a session's sequence, behind which a request's messages come.

    Attributes:
        start: Number of its tokens.
        after: Role of its last message; empty: there is none.
        is_open: Whether that is an answer as the model wrote it.
        end_token: Token that ended that answer.
        submit: Submits the request to the engine.
        mark: Note for the engine about the sequence with the request's messages and answer.
    """

    session_id: str
    start: int
    after: str
    is_open: bool
    end_token: int | None
    submit: Submit
    mark: bytes


class Pipeline:
    """Runs requests against one store and one engine."""

    def __init__(
        self,
        *,
        store: AsyncDaemonStore,
        engine: Engine,
        prompts: PromptBuilder,
        items: ItemStage,
        sampling: SamplingDefaults,
    ) -> None:
        self.store = store
        self.engine = engine
        self._prompts = prompts
        self._items, self.knows, self.early = items, items.knows, items.early.body
        self._sampling = sampling

    @property
    def vllm_rules(self) -> VllmRules | None:
        """Rules for prompts of vLLM; ``None`` if the prompts are not for vLLM."""
        renderer = self.engine
        if not isinstance(renderer, Renderer) or not renderer.is_for_vllm:
            return None
        return VllmRules(
            merges_system=self._prompts.merges_system,
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
        if self.engine.info is None:
            raise EngineUnavailable("the engine is not ready; try again")
        if (use := request.tool_use) is not None:
            form = msgspec.json.encode(self._prompts.tool_form(use)).decode()
            request = msgspec.structs.replace(request, tools=form)
        trace = own.trace
        trace.media, trace.where = counting.media_of(request.files), "preprocess"
        request = self._with_frames(request)
        self._items.check(request.items)
        self._items.documents.check(request.documents)
        has_pages = self._items.documents.has_images
        capabilities.check(self.engine.info, request, has_pages=has_pages)
        release = own.release_after(request.n)
        try:
            given = request
            if place is None:
                read, submit = await self._read_and_compute(request, trace)
            else:
                read, submit = await self._read_documents(request, trace), place.submit
            request = with_pages(request, read)
            engine_request, info = await self._prepare(request, trace, place)
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
        has_sessions = info is not None and info.has_sessions and self._prompts.can_append
        return engine if has_sessions and isinstance(engine, SessionEngine) else None

    async def hear(self, request: GenerateRequest, own: RequestScope, place: SequencePlace) -> None:
        """Extend the sequence of a session by messages without an answer.

        Raises:
            InvalidRequest: Something in the request is invalid.
            Unavailable: Try again.
        """
        try:
            engine_request, _ = await self._prepare(request, own.trace, place)
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
            return await self._read_documents(request, trace), self.engine.submit
        ahead = PromptAhead(request, partial(self._compute_beginning, trace))
        try:
            async with ahead.running():
                read = await self._read_documents(request, trace, ahead.begun)
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
            asked, _ = await self._prepare(request, inner, is_ahead=True)
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

    async def make_known(self, request: GenerateRequest, own: RequestScope) -> tuple[bytes, ...]:
        """Make the features of a request's media, so that its messages can come by names alone.

        The features stay pinned until the request's scope ends; later they are cached.

        Returns:
            The digests of the media and documents, in order.

        Raises:
            InvalidRequest: Something in the request is invalid.
            Unavailable: Try again.
        """
        digests, _, _ = await self._make_known(self._with_frames(request), own, is_prompt=False)
        return digests

    async def make_known_and_count(
        self, request: GenerateRequest, own: RequestScope
    ) -> tuple[tuple[bytes, ...], int]:
        """Do what `make_known` does; return the digests, and the number of the messages' tokens."""
        digests, request, prompts = await self._make_known(request, own, is_prompt=True)
        template = TemplateOptions(begins_answer=False)
        counted = msgspec.structs.replace(request, template=template, max_tokens=1)
        prompt, _ = await self._prompt(counted, prompts, own.trace)
        return digests, len(prompt.token_ids)

    async def _make_known(
        self, request: GenerateRequest, own: RequestScope, *, is_prompt: bool
    ) -> tuple[tuple[bytes, ...], GenerateRequest, list[ItemPrompt]]:
        """Return the digests, the request with its documents' pages, and the items' prompts."""
        if (info := self.engine.info) is None:
            raise EngineUnavailable("the engine is not ready; try again")
        trace = own.trace
        trace.media, trace.where = counting.media_of(request.files), "preprocess"
        self._items.check(request.items)
        self._items.documents.check(request.documents)
        capabilities.check(info, request, has_pages=self._items.documents.has_images)
        read = await self._read_documents(request, trace, is_prompt=is_prompt)
        paged = with_pages(request, read)
        found = await self._items.read(paged.items, trace)
        with found.awaited():
            ready = await self._items.prepare(request.request_id, found, trace)
        digests = digests_of(request, read, [item.digest for item in found.in_order])
        return digests, paged, [item.prompt for item in ready]

    async def missing(self, request: ItemRequest) -> set[MediaPart]:
        """Return the known items whose features are gone.

        Raises:
            Unavailable: Try again.
        """
        return await self._items.missing(request)

    async def render(
        self, request: GenerateRequest, trace: Trace, *, with_features: bool
    ) -> Rendered:
        """Return the prompt for the engine, without running it.

        Images are placed by their headers alone. Features are made only if they are requested, or
        if the length of a video or audio clip is needed.

        Raises:
            InvalidRequest: Something in the request is invalid.
            Unavailable: Try again.
        """
        trace.media, trace.where = counting.media_of(request.files), "preprocess"
        request = self._with_frames(request)
        self._items.check(request.items)
        self._items.documents.check(request.documents)
        request = with_pages(request, await self._read_documents(request, trace))
        found = await self._items.read(request.items, trace)
        with found.awaited():
            sizes: list[int | None] = [None] * len(found.in_order)
            prompts = found.prompts
            if prompts is None or with_features:
                ready = await self._items.prepare(request.request_id, found, trace)
                prompts = [item.prompt for item in ready]
                if with_features:
                    sizes = [item.handle.nbytes for item in ready]
            prompt, _ = await self._prompt(request, prompts, trace)
            items = [
                RenderedItem(
                    modality=item.modality,
                    key=item.key.hex(),
                    hash=self._hash_of(item),
                    placeholder=placeholder,
                    span=span,
                    features_nbytes=nbytes,
                )
                for item, placeholder, span, nbytes in zip(
                    found.in_order, prompt.placeholders, prompt.spans, sizes, strict=True
                )
            ]
            info, given = self.engine.info, request.prompt
            return Rendered(
                prompt.token_ids,
                items,
                info.max_model_len if info is not None else 0,
                self._prompts.text_of(given) if isinstance(given, tuple) else "",
                request.cache_salt,
            )

    def _with_frames(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with the videos that become images, if the model takes none."""
        info = self.engine.info
        return request if info is None else with_frames(request, self.modalities(info))

    async def _read_documents(
        self,
        request: GenerateRequest,
        trace: Trace,
        begun: Callable[[Sequence[ReadDocument]], None] | None = None,
        *,
        is_prompt: bool = True,
    ) -> list[ReadDocument]:
        """Return the documents of a request; the features of their pages exist.

        Args:
            begun: See `DocumentReader.read`.
            is_prompt: Whether all messages come in one prompt.
        """
        if not request.documents:
            return []
        info = self.engine.info
        limit = info.max_model_len if info is not None else None
        return await self._items.documents.read(
            *(request.items, request.documents, trace),
            max_tokens=await self._room_beside_texts(request) if is_prompt else limit,
            begun=begun,
        )

    async def _room_beside_texts(self, request: GenerateRequest) -> int | None:
        """Return the most tokens that media may have in the prompt; ``None`` if unknown.

        Raises:
            PromptTooLong: The texts alone, and the shortest answer, need more than the context.
        """
        kept = (TextPart, CallPart)
        messages = tuple(
            Message(each.role, tuple(p for p in each.parts if isinstance(p, kept)), each.extra)
            for each in request.messages
        )
        texts = msgspec.structs.replace(request, messages=messages, max_tokens=None)
        try:
            _, sampling = await self._prompt(texts, [], Trace(request.request_id, ""))
        except PromptTooLong:
            raise
        except InvalidRequest:  # the chat template needs the media
            info = self.engine.info
            return info.max_model_len if info is not None else None
        return sampling.max_tokens - max(1, request.min_tokens or 0)

    def _hash_of(self, item: ReceivedItem) -> str:
        renderer = self.engine
        if not isinstance(renderer, Renderer) or item.max_pixels:
            return item.key.hex()
        uuid = item.name.uuid if item.name is not None else ""
        return renderer.hash_of(item.modality, item.key, self._items.sent(item), uuid)

    async def _prepare(
        self,
        request: GenerateRequest,
        trace: Trace,
        place: SequencePlace | None = None,
        *,
        is_ahead: bool = False,
    ) -> tuple[EngineRequest, PromptInfo]:
        """Return the engine's request; the features are pinned under the request.

        Args:
            is_ahead: Whether another request counts these items as its own.
        """
        request_id = request.request_id
        found = await self._items.read(request.items, trace)
        with found.awaited():
            if (prompts := found.prompts) is not None:
                # Too long prompts are refused before any work is done.
                prompt, sampling = await self._prompt(request, prompts, trace, place=place)
                ready = await self._items.prepare(request_id, found, trace, is_ahead=is_ahead)
            else:
                ready = await self._items.prepare(request_id, found, trace, is_ahead=is_ahead)
                prompts = [item.prompt for item in ready]
                prompt, sampling = await self._prompt(request, prompts, trace, place=place)
        items = [
            Item(part.modality, item.key, item.handle, placeholder)
            for part, item, placeholder in zip(
                request.media, ready, prompt.placeholders, strict=True
            )
        ]
        engine_request = EngineRequest(request_id, prompt.token_ids, items, sampling, request.share)
        if place is not None:
            engine_request = msgspec.structs.replace(
                engine_request, session_id=place.session_id, start=place.start, mark=place.mark
            )
        digests = tuple(item.digest for item in found.in_order)
        return engine_request, PromptInfo(digests, len(prompt.token_ids))

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
            self._prompts.detokenizer(
                skips_special=request.skips_special and request.tool_use is None
            ),
            StopMatcher(request.stop, request.includes_stop),
            request.logprobs.write if request.logprobs is not None else None,
            engine_request.sampling.min_tokens,
            engine_request.sampling.stop_token_ids,
            self._prompts.call_reader(request.tool_use, index),
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

    async def _prompt(
        self,
        request: GenerateRequest,
        written: Sequence[ItemPrompt],
        trace: Trace,
        *,
        place: SequencePlace | None = None,
    ) -> tuple[Prompt, Sampling]:
        """Return the prompt's tokens and the sampling; ``max_tokens`` is at most the rest of the
        model's context.

        Raises:
            PromptTooLong: The context has no space for the prompt and the shortest answer.
        """
        if self.engine.info is None:
            raise EngineUnavailable("the engine is not ready; try again")
        info = self.engine.info
        limit = info.max_model_len
        start_ns = time.monotonic_ns()
        texts = [p for m in request.messages for p in m.parts if isinstance(p, TextPart)]
        num_characters = sum(len(part.text) for part in texts) + request.template.num_characters
        num_characters += len(request.prompt or "")
        calls = [p for m in request.messages for p in m.parts if isinstance(p, CallPart)]
        num_characters += sum(len(call.name) + len(call.arguments) for call in calls)
        # Tokenizing costs time and memory; too long texts are refused by their length.
        if num_characters > limit * self._prompts.max_token_characters:
            raise PromptTooLong(
                f"the text has {num_characters} characters; the model has room for {limit} tokens",
                param=Param.MESSAGES,
            )
        num_parts = len(request.messages) + len(texts) + len(calls)
        if num_characters + _PART_CHARACTERS * num_parts < _LONG_TEXT:
            prompt = self._build(request, written, place)
        else:
            prompt = await asyncio.to_thread(self._build, request, written, place)
        num_tokens = len(prompt.token_ids) + (0 if place is None else place.start)
        trace.stage(start_ns, "tokenize", note=f"{num_tokens} tokens")
        room = limit - num_tokens
        max_tokens = room if request.max_tokens is None else request.max_tokens
        needed = max(1, request.min_tokens or 0)
        if needed > room:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens and {needed} were asked for; "
                f"the model has room for {limit} in all",
                param=Param.MESSAGES,
            )
        if max_tokens > room:
            max_tokens = trace.reduced_to = room
        sampling = self._sampling.apply(request, max_tokens=max_tokens)
        return prompt, capabilities.within(info, sampling)

    def _build(
        self,
        request: GenerateRequest,
        written: Sequence[ItemPrompt],
        place: SequencePlace | None,
    ) -> Prompt:
        if place is not None:
            prompt = self._prompts.appended(
                *(request.messages, written, request.template),
                after=place.after,
                is_open=place.is_open,
                end_token=place.end_token,
                tenant=request.tenant,
            )
        elif request.prompt is None:
            prompt = self._prompts.build(
                request.messages, written, request.template, tenant=request.tenant
            )
        else:
            tokens = self._prompts.plain(
                request.prompt,
                adds_special=request.adds_special,
                truncation=self._truncation(request),
            )
            prompt = Prompt(tokens, [], [])
        if not prompt.token_ids:
            raise InvalidRequest("the prompt has no tokens", param=Param.MESSAGES)
        return prompt

    def _truncation(self, request: GenerateRequest) -> Truncation | None:
        """Return the limit on the prompt's tokens; as in vLLM, -1 leaves space for one token of an
        answer, if there is one.

        Raises:
            InvalidRequest: The limit is larger than the model's context.
        """
        asked, info = request.truncation, self.engine.info
        if asked is None or info is None:
            return asked
        if asked.num_tokens > info.max_model_len:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {asked.num_tokens}, and the model has room for "
                f"{info.max_model_len} tokens",
                param="truncate_prompt_tokens",
            )
        if asked.num_tokens >= 0:
            return asked
        return replace(asked, num_tokens=info.max_model_len - (request.max_tokens != 0))

    def modalities(self, info: EngineInfo) -> list[Modality]:
        """Return the modalities of requests that this engine and the model support."""
        return [each for each in info.modalities if self._items.takes(each)]

    async def close(self) -> None:
        await self._items.close()


def _sampling_of(sampling: Sampling, index: int) -> Sampling:
    """Return sampling with a seed of its own for each answer: they differ and are reproducible."""
    if sampling.seed is None or index == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=sampling.seed + index)
