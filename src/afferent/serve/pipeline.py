"""The one path of every request: media to handles, messages to tokens, tokens to text.

Everything that a request holds in the store is under its own id, so that one message drops it all,
wherever the request ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from afferent.engine.protocol import Accepted, Engine, EngineRequest, Finished, Tokens
from afferent.errors import EngineUnavailable, PromptTooLong
from afferent.metrics import Metrics
from afferent.preprocess.plan import Prompt as ItemPrompt
from afferent.serve.account import Account
from afferent.serve.items import ItemStage, ReadyItem
from afferent.serve.prompt import Prompt, PromptBuilder
from afferent.serve.request import (
    End,
    GenerateRequest,
    Output,
    Rendered,
    RenderedItem,
    SamplingDefaults,
    StopMatcher,
    TextDelta,
    TextPart,
    Usage,
)
from afferent.store.async_client import AsyncDaemonStore
from afferent.types import Handle, Item, Sampling

_LONG_TEXT = 8_000  # characters; templates and tokenizers leave the event loop from here on


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
        metrics: Metrics,
    ) -> None:
        self.store = store
        self.engine = engine
        self._prompts = prompts
        self._items = items
        self._sampling = sampling
        self._metrics = metrics

    async def run(self, request: GenerateRequest, account: Account) -> AsyncGenerator[Output, None]:
        """The answer: pieces of text, then `End`. Closing the iterator early aborts the request.

        Raises:
            InvalidRequest: Something in the request can't be used.
            Unavailable: Try again.
        """
        if self.engine.info is None:
            raise EngineUnavailable("the engine is not ready; try again")
        self._items.check(request.media)
        released = False
        try:
            engine_request = await self._prepare(request, account)
            async with aclosing(self._generate(request, engine_request, account)) as outputs:
                async for output in outputs:
                    if output is None:  # accepted: the engine holds its own pins now
                        self.store.forget(request.request_id)
                        released = True
                    else:
                        yield output
        finally:
            if not released:
                self.store.forget(request.request_id)
            for span in account.spans:
                seconds = (span.end_ns - span.start_ns) / 1e9
                self._metrics.stage_seconds.labels(span.stage).observe(seconds)
                if span.copied_nbytes:
                    self._metrics.copied_nbytes.labels(span.stage).inc(span.copied_nbytes)

    async def render(
        self, request: GenerateRequest, account: Account, *, with_features: bool
    ) -> Rendered:
        """The prompt that the engine would get, and nothing of it is run.

        Pictures are placed by their headers alone. Features are made only if they are asked for, or
        if a video's or a sound's length has to be known.

        Raises:
            InvalidRequest: Something in the request can't be used.
            Unavailable: Try again.
        """
        self._items.check(request.media)
        try:
            sources = await self._items.read(request.request_id, request.media, account)
            plans = [source.plan for source in sources if source.plan is not None]
            if len(plans) == len(sources) and not with_features:
                written = [plan.prompt for plan in plans]
                prompt, _ = await self._prompt(request, written, account)
                handles: list[Handle | None] = [None] * len(sources)
            else:
                ready = await self._items.prepare(request.request_id, sources, account)
                prompt, _ = await self._prompt(request, [item.prompt for item in ready], account)
                handles = [item.handle if with_features else None for item in ready]
            items = [
                RenderedItem(source.modality, source.key.hex(), placeholder, handle)
                for source, placeholder, handle in zip(
                    sources, prompt.placeholders, handles, strict=True
                )
            ]
            return Rendered(prompt.token_ids, items)
        finally:
            self.store.forget(request.request_id)

    async def _prepare(self, request: GenerateRequest, account: Account) -> EngineRequest:
        """All that the engine has to know; the features are pinned under the request."""
        request_id = request.request_id
        sources = await self._items.read(request_id, request.media, account)
        plans = [source.plan for source in sources if source.plan is not None]
        ready: list[ReadyItem] = []
        if len(plans) == len(sources):  # what is too long is refused before any work is done
            built = await self._prompt(request, [plan.prompt for plan in plans], account)
            ready = await self._items.prepare(request_id, sources, account)
        else:
            ready = await self._items.prepare(request_id, sources, account)
            built = await self._prompt(request, [item.prompt for item in ready], account)
        prompt, sampling = built
        items = [
            Item(part.modality, item.key, item.handle, placeholder)
            for part, item, placeholder in zip(
                request.media, ready, prompt.placeholders, strict=True
            )
        ]
        return EngineRequest(request_id, prompt.token_ids, items, sampling)

    async def _generate(
        self, request: GenerateRequest, engine_request: EngineRequest, account: Account
    ) -> AsyncGenerator[Output | None, None]:
        """`None` when the engine has accepted, then the answer."""
        start_ns = time.monotonic_ns()
        detokenizer = self._prompts.detokenizer()
        matcher = StopMatcher(request.stop)
        num_prompt, num_tokens = len(engine_request.token_ids), 0
        async with aclosing(self.engine.submit(engine_request)) as events:
            async for event in events:
                match event:
                    case Accepted():
                        yield None
                    case Tokens(token_ids, spans):
                        account.add(spans)
                        if num_tokens == 0:
                            account.stage(start_ns, "first token")
                        num_tokens += len(token_ids)
                        if text := matcher.feed(detokenizer.feed(token_ids)):
                            yield TextDelta(text)
                        if matcher.stopped:
                            yield End("stop", Usage(num_prompt, num_tokens))
                            break
                    case Finished(reason, spans):
                        account.add(spans)
                        if text := matcher.flush():
                            yield TextDelta(text)
                        yield End(reason, Usage(num_prompt, num_tokens))
        self._metrics.tokens.labels("prompt").inc(num_prompt)
        self._metrics.tokens.labels("completion").inc(num_tokens)

    async def _prompt(
        self, request: GenerateRequest, written: Sequence[ItemPrompt], account: Account
    ) -> tuple[Prompt, Sampling]:
        """The prompt's tokens, and how to go on from them; refused if there is no room.

        Raises:
            PromptTooLong: The prompt and the answer asked for exceed what the model has room for.
        """
        if self.engine.info is None:
            raise EngineUnavailable("the engine is not ready; try again")
        limit = self.engine.info.max_model_len
        start_ns = time.monotonic_ns()
        texts = [p for m in request.messages for p in m.parts if isinstance(p, TextPart)]
        num_characters = sum(len(part.text) for part in texts)
        # Tokenizing costs time and memory; what can't fit is refused by its length alone.
        if num_characters > limit * self._prompts.max_token_characters:
            raise PromptTooLong(
                f"the text has {num_characters} characters; the model has room for {limit} tokens",
                param="messages",
            )
        if num_characters + len(request.messages) + len(texts) < _LONG_TEXT:
            prompt = self._prompts.build(request.messages, written)
        else:
            prompt = await asyncio.to_thread(self._prompts.build, request.messages, written)
        num_tokens = len(prompt.token_ids)
        account.stage(start_ns, "template, tokens", note=f"{num_tokens} tokens")
        room = limit - num_tokens
        max_tokens = room if request.max_tokens is None else request.max_tokens
        if room < 1 or max_tokens > room:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens and {max(max_tokens, 1)} were asked for; "
                f"the model has room for {limit} in all",
                param="messages",
            )
        return prompt, self._sampling.apply(request, max_tokens=max_tokens)

    async def close(self) -> None:
        await self._items.close()
