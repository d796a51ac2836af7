"""From a request to the engine's request: media to handles, messages to tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from afferent.builtin.pipeline import capabilities
from afferent.builtin.pipeline.document_pages import digests_of, with_frames, with_pages
from afferent.builtin.pipeline.prompt import Prompt, PromptBuilder
from afferent.builtin.pipeline.request import (
    CallPart,
    GenerateRequest,
    Message,
    PromptInfo,
    Rendered,
    RenderedItem,
    SamplingDefaults,
    TemplateOptions,
    TextPart,
    Truncation,
)
from afferent.engines.protocol import Engine, EngineInfo, EngineRequest, Submit
from afferent.engines.render import Renderer
from afferent.errors import EngineUnavailable, InvalidRequest, Param, PromptTooLong
from afferent.items.documents import ReadDocument
from afferent.items.item import ReceivedItem
from afferent.items.stage import ItemStage
from afferent.media.families.plan import Prompt as ItemPrompt
from afferent.proxy import counting
from afferent.proxy.request_scope import RequestScope
from afferent.telemetry.trace import Trace
from afferent.types import Item, Modality, Sampling

_LONG_TEXT = 8_000  # characters; longer texts are templated and tokenized in a thread
_PART_CHARACTERS = 8  # minimum cost of a message or part, in characters


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


class PromptStage:
    """Makes the prompts of requests for one model and one engine; the features then exist."""

    def __init__(
        self,
        *,
        engine: Engine,
        builder: PromptBuilder,
        items: ItemStage,
        sampling: SamplingDefaults,
    ) -> None:
        self._engine, self._builder, self._items = engine, builder, items
        self._sampling = sampling

    def check(self, request: GenerateRequest, *, is_run: bool = True) -> None:
        """Check what can be checked before media are read.

        Args:
            is_run: Whether the engine runs the request.

        Raises:
            InvalidRequest: The model or the engine does not take something in the request.
            EngineUnavailable: The engine is not ready.
        """
        if (info := self._engine.info) is None and is_run:
            raise EngineUnavailable("the engine is not ready; try again")
        documents = self._items.documents
        self._items.check(request.items)
        documents.check(request.documents)
        if is_run and info is not None:
            capabilities.check(info, request, has_pages=documents.has_images)

    async def engine_request(
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

    async def read_documents(
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
        info = self._engine.info
        limit = info.max_model_len if info is not None else None
        return await self._items.documents.read(
            *(request.items, request.documents, trace),
            max_tokens=await self._room_beside_texts(request) if is_prompt else limit,
            begun=begun,
        )

    def with_frames(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with the videos that become images, if the model takes none."""
        info = self._engine.info
        return request if info is None else with_frames(request, self.modalities(info))

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
        request = self.with_frames(request)
        self.check(request, is_run=False)
        request = with_pages(request, await self.read_documents(request, trace))
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
            info, given = self._engine.info, request.prompt
            return Rendered(
                prompt.token_ids,
                items,
                info.max_model_len if info is not None else 0,
                self._builder.text_of(given) if isinstance(given, tuple) else "",
                request.cache_salt,
            )

    async def make_known(self, request: GenerateRequest, own: RequestScope) -> tuple[bytes, ...]:
        """Make the features of a request's media, so that its messages can come by names alone.

        The features stay pinned until the request's scope ends; later they are cached.

        Returns:
            The digests of the media and documents, in order.

        Raises:
            InvalidRequest: Something in the request is invalid.
            Unavailable: Try again.
        """
        digests, _, _ = await self._make_known(self.with_frames(request), own, is_prompt=False)
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
        trace = own.trace
        trace.media, trace.where = counting.media_of(request.files), "preprocess"
        self.check(request)
        read = await self.read_documents(request, trace, is_prompt=is_prompt)
        paged = with_pages(request, read)
        found = await self._items.read(paged.items, trace)
        with found.awaited():
            ready = await self._items.prepare(request.request_id, found, trace)
        digests = digests_of(request, read, [item.digest for item in found.in_order])
        return digests, paged, [item.prompt for item in ready]

    def modalities(self, info: EngineInfo) -> list[Modality]:
        """Return the modalities of requests that this engine and the model support."""
        return [each for each in info.modalities if self._items.takes(each)]

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
        if self._engine.info is None:
            raise EngineUnavailable("the engine is not ready; try again")
        info = self._engine.info
        limit = info.max_model_len
        start_ns = time.monotonic_ns()
        texts = [p for m in request.messages for p in m.parts if isinstance(p, TextPart)]
        num_characters = sum(len(part.text) for part in texts) + request.template.num_characters
        num_characters += len(request.prompt or "")
        calls = [p for m in request.messages for p in m.parts if isinstance(p, CallPart)]
        num_characters += sum(len(call.name) + len(call.arguments) for call in calls)
        # Tokenizing costs time and memory; too long texts are refused by their length.
        if num_characters > limit * self._builder.max_token_characters:
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
        if request.is_only_counted:
            room = max_tokens = needed
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
            prompt = self._builder.appended(
                *(request.messages, written, request.template),
                after=place.after,
                is_open=place.is_open,
                end_token=place.end_token,
                tenant=request.tenant,
            )
        elif request.prompt is None:
            prompt = self._builder.build(
                request.messages, written, request.template, tenant=request.tenant
            )
        else:
            tokens = self._builder.plain(
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
        asked, info = request.truncation, self._engine.info
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

    async def _room_beside_texts(self, request: GenerateRequest) -> int | None:
        """Return the most tokens that media may have in the prompt; ``None`` if unknown, or any.

        Raises:
            PromptTooLong: The texts alone, and the shortest answer, need more than the context.
        """
        if request.is_only_counted:
            return None
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
            info = self._engine.info
            return info.max_model_len if info is not None else None
        return sampling.max_tokens - max(1, request.min_tokens or 0)

    def _hash_of(self, item: ReceivedItem) -> str:
        renderer = self._engine
        if not isinstance(renderer, Renderer) or item.max_pixels:
            return item.key.hex()
        uuid = item.name.uuid if item.name is not None else ""
        return renderer.hash_of(item.modality, item.key, self._items.sent(item), uuid)
