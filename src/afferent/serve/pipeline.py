"""The one path of every request: media to handles, messages to tokens, tokens to text.

Everything that a request holds in the store is under its own id, so that one message drops it all,
wherever the request ended.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from afferent import keys
from afferent.config import Limits
from afferent.engine.protocol import Accepted, Engine, EngineRequest, Finished, Tokens
from afferent.errors import (
    AfferentError,
    ArenaTooSmall,
    EngineUnavailable,
    InternalError,
    PromptTooLong,
    TooManyItems,
    error_from,
)
from afferent.ingest.digest import Digester
from afferent.ingest.fetch import Fetcher
from afferent.ingest.probe import ImageHeader, probe_image
from afferent.ingest.source import Media, read_media
from afferent.metrics import Metrics
from afferent.preprocess.family import Family, FeaturePlan
from afferent.serve.account import Account
from afferent.serve.prompt import Prompt, PromptBuilder
from afferent.serve.request import (
    End,
    GenerateRequest,
    Output,
    SamplingDefaults,
    StopMatcher,
    TextDelta,
    TextPart,
    Usage,
)
from afferent.store import messages as m
from afferent.store.allocator import round_up
from afferent.store.async_client import AsyncDaemonStore
from afferent.store.region import Shares
from afferent.types import ContentKey, Handle, Item, Modality, ObjectKind, Sampling, encode

_LONG_TEXT = 8_000  # characters; templates and tokenizers leave the event loop from here on

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Image:
    """One image of a request, before anything is decoded."""

    data: bytes
    header: ImageHeader
    key: ContentKey
    plan: FeaturePlan


class Pipeline:
    """Runs requests against one store and one engine."""

    def __init__(
        self,
        *,
        store: AsyncDaemonStore,
        engine: Engine,
        prompts: PromptBuilder,
        family: Family,
        fingerprint: bytes,
        limits: Limits,
        shares: Shares,
        sampling: SamplingDefaults,
        timeout_s: float,
        metrics: Metrics,
        digester: Digester,
    ) -> None:
        self.store = store
        self.engine = engine
        self._prompts = prompts
        self._family = family
        self._fingerprint = fingerprint
        self._limits, self._shares = limits, shares
        self._sampling = sampling
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._fetcher = Fetcher(limits)
        self._digester = digester

    async def run(self, request: GenerateRequest, account: Account) -> AsyncGenerator[Output, None]:
        """The answer: pieces of text, then `End`. Closing the iterator early aborts the request.

        Raises:
            InvalidRequest: Something in the request can't be used.
            Unavailable: Try again.
        """
        if self.engine.info is None:
            raise EngineUnavailable("the engine is not ready; try again")
        if len(request.images) > self._limits.max_images:
            raise TooManyItems(
                f"the request has {len(request.images)} images; at most "
                f"{self._limits.max_images} are accepted",
                param="messages",
            )
        released = False
        try:
            images = await self._read_images(request, account)
            prompt, sampling = await self._prompt(request, images, account)
            handles = await self._features(request.request_id, images, account)
            items = [
                Item(Modality.IMAGE, image.key, handles[image.key], placeholder)
                for image, placeholder in zip(images, prompt.placeholders, strict=True)
            ]
            engine_request = EngineRequest(request.request_id, prompt.token_ids, items, sampling)
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
        self, request: GenerateRequest, images: Sequence[_Image], account: Account
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
        plans = [image.plan for image in images]
        if num_characters + len(request.messages) + len(texts) < _LONG_TEXT:
            prompt = self._prompts.build(request.messages, plans)
        else:
            prompt = await asyncio.to_thread(self._prompts.build, request.messages, plans)
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

    # Media

    async def _read_images(self, request: GenerateRequest, account: Account) -> list[_Image]:
        """The request's images: their bytes, what their headers say, and their keys."""
        if not request.images:
            return []
        start_ns = time.monotonic_ns()
        fetches = self._fetcher.session(max_nbytes=self._limits.max_body_nbytes)
        reads = [
            read_media(image.url, limits=self._limits, fetches=fetches) for image in request.images
        ]
        media = await gather(reads)
        fetched = sum(item.origin == "fetch" for item in media)
        nbytes = sum(len(item.data) for item in media)
        stage = "fetch" if fetched else "base64"
        account.stage(start_ns, stage, copied_nbytes=nbytes, note=_count(len(media), "image"))
        start_ns = time.monotonic_ns()
        headers = [probe_image(item.data, self._limits) for item in media]
        digests = await self._digester.digest_all([item.data for item in media])
        images = [
            self._identify(item, header, digest)
            for item, header, digest in zip(media, headers, digests, strict=True)
        ]
        account.stage(start_ns, "header, digest")
        return images

    def _identify(self, media: Media, header: ImageHeader, digest: bytes) -> _Image:
        key = keys.features_key(tenant="", fingerprint=self._fingerprint, options=b"", media=digest)
        plan = self._family.plan(header.width, header.height)
        return _Image(media.data, header, key, plan)

    async def _features(
        self, request_id: str, images: Sequence[_Image], account: Account
    ) -> dict[ContentKey, Handle]:
        """Handles of the features, pinned under the request; made where they are missing."""
        distinct = list({image.key: image for image in images}.values())
        if not distinct:
            return {}
        self._check_room(distinct)
        start_ns = time.monotonic_ns()
        outcomes = await self._acquire(request_id, distinct, [None] * len(distinct))
        account.stage(start_ns, "acquire", note=_summary(outcomes))
        absent = [index for index, outcome in enumerate(outcomes) if outcome.state == "absent"]
        if absent:
            missing = [distinct[index] for index in absent]
            start_ns = time.monotonic_ns()
            raw = await self._write_raw(request_id, missing)
            copied = sum(len(image.data) for image in missing)
            account.stage(start_ns, "into the arena", copied_nbytes=copied)
            start_ns = time.monotonic_ns()
            queued = await self._acquire(request_id, missing, raw)
            await self.store.release(request_id, raw)
            account.stage(start_ns, "queue jobs", note=_summary(queued))
            for index, outcome in zip(absent, queued, strict=True):
                outcomes[index] = outcome
        states = [outcome.state for outcome in outcomes]
        pending = [
            index for index, outcome in enumerate(outcomes) if outcome.state in ("busy", "miss")
        ]
        if pending:
            start_ns = time.monotonic_ns()
            wait_keys = [distinct[index].key for index in pending]
            made = await self.store.wait(request_id, wait_keys, timeout_s=self._timeout_s)
            account.stage(start_ns, "wait for features", note=_count(len(made), "item"))
            for index, outcome in zip(pending, made, strict=True):
                outcomes[index] = outcome
                account.add(outcome.spans)
        self._count_outcomes(states, outcomes, account)
        return {
            image.key: _handle_of(outcome)
            for image, outcome in zip(distinct, outcomes, strict=True)
        }

    def _check_room(self, images: Sequence[_Image]) -> None:
        """Refuse what could never be in the arena at once, however long one waits.

        Raises:
            ArenaTooSmall: The media or their features exceed their share of the arena.
        """
        for kind, needed in (
            (ObjectKind.RAW, sum(round_up(len(image.data)) for image in images)),
            (ObjectKind.FEATURES, sum(round_up(image.plan.nbytes) for image in images)),
        ):
            share = int(self.store.capacity_nbytes * self._shares[kind])
            if needed > share:
                raise ArenaTooSmall(
                    f"the request's media take {needed} bytes as {kind}; "
                    f"their share of the arena is {share}",
                    param="messages",
                )

    async def _acquire(
        self, request_id: str, images: Sequence[_Image], raw: Sequence[Handle | None]
    ) -> list[m.Outcome]:
        """Pin the features that exist; queue jobs for the others where there are raw media."""
        items = []
        for image, handle in zip(images, raw, strict=True):
            job = m.JobSpec([handle], encode(image.header)) if handle is not None else None
            kind, nbytes = ObjectKind.FEATURES, image.plan.nbytes
            items.append(m.AcquireItem(image.key, kind, nbytes, job))
        return await self.store.acquire(request_id, items)

    async def _write_raw(self, request_id: str, images: Sequence[_Image]) -> list[Handle]:
        """The encoded media in the arena, for the workers to read."""
        handles = await self.store.create(
            request_id, [m.CreateItem(ObjectKind.RAW, len(image.data)) for image in images]
        )
        for image, handle in zip(images, handles, strict=True):
            target = np.frombuffer(self.store.block(handle), dtype=np.uint8)
            np.copyto(target, np.frombuffer(image.data, dtype=np.uint8))
        sealed = [m.SealItem(handle, handle.nbytes) for handle in handles]
        return await self.store.seal(request_id, sealed)

    def _count_outcomes(
        self, states: Sequence[str], outcomes: Sequence[m.Outcome], account: Account
    ) -> None:
        words = {"hit": "hit", "busy": "joined", "miss": "made"}
        names = [
            "failed" if outcome.state == "failed" else words[state]
            for state, outcome in zip(states, outcomes, strict=True)
        ]
        for name in dict.fromkeys(names):
            count = names.count(name)
            self._metrics.items.labels("image", name).inc(count)
            account.items.append(f"{_count(count, 'image')} {name}")

    async def close(self) -> None:
        await self._fetcher.close()
        self._digester.close()


def _summary(outcomes: Sequence[m.Outcome]) -> str:
    """How many of each, such as ``"3 hit, 1 absent"``."""
    counts = Counter(outcome.state for outcome in outcomes)
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def _handle_of(outcome: m.Outcome) -> Handle:
    if outcome.failure is not None:
        raise error_from(outcome.failure.code, outcome.failure.message)
    if outcome.handle is None:
        raise InternalError("the store named no handle")
    return outcome.handle


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


async def gather(coroutines: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results in order; the first failure cancels the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except* AfferentError as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
