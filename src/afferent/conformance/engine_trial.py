"""Questions to an engine with known answers, and checks of its pins meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np

from afferent.engines.protocol import Accepted, Engine, EngineEvent, EngineRequest, Finished, Tokens
from afferent.errors import AfferentError, StoreFull
from afferent.store.block import codec
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import SealItem
from afferent.types import (
    CreateItem,
    Handle,
    Item,
    Modality,
    ObjectKind,
    Placeholder,
    Sampling,
    TokenLogprobs,
)

_FILLER = "afferent/filler"
_LOOK_AGAIN_S = 0.01

Events = AsyncGenerator[EngineEvent, None]


class NotConforming(AssertionError):
    """A promise of `afferent.engines.protocol` is broken; the message names it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Item of a question: its features, and the prompt positions that it fills."""

    modality: Modality
    features: codec.Tree
    placeholder: Placeholder


@dataclass(frozen=True, slots=True)
class Question:
    """Request with a known answer.

    ``answer`` is the result of greedy decoding, without the end token: at least two tokens, after
    which the engine chooses one of its end-of-sequence tokens.
    """

    token_ids: list[int]
    parts: list[Part]
    answer: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Engine under test, ready for requests, with all that the checks need.

    Attributes:
        engine: As a frontend would use it, on this event loop.
        store_address: Address of the engine's daemon. No other process uses it meanwhile.
        question: Returns different features for different numbers; at least one item, better two.
        stop: Ends the engine: kills its process, or closes its connection. Async or not.
        text: Returns the text of tokens. Required for an engine that supports ``json_schema``,
            ``regex`` or ``choice``.
        timeout_s: Timeout of each event of the engine.
        settle_s: Time within which it must release its pins.
    """

    engine: Engine
    store_address: str
    question: Callable[[int], Question]
    stop: Callable[[], Awaitable[None] | None]
    text: Callable[[Sequence[int]], str] | None = None
    timeout_s: float = 30.0
    settle_s: float = 10.0


@dataclass(slots=True)
class Said:
    """Answer of a request: all events after `Accepted`."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: str = ""


class Trial:
    """Driver of an engine, in the role of a frontend, step by step."""

    def __init__(self, subject: Subject, store: AsyncDaemonStore) -> None:
        self.subject, self.engine, self.store = subject, subject.engine, store
        self._numbers = itertools.count()

    def question(self, number: int) -> Question:
        return self.subject.question(number)

    async def place(self, question: Question, **sampling: object) -> EngineRequest:
        """Put the features into the store; the caller pins them under the request's id."""
        request_id, items = f"trial-{next(self._numbers)}", []
        for part in question.parts:
            key = secrets.token_bytes(32)  # a new key, unknown to any cache of the engine
            nbytes = codec.plan(part.features).nbytes
            wanted = CreateItem(ObjectKind.FEATURES, nbytes, key)
            (handle,) = await self.store.create(request_id, [wanted])
            used = codec.write_into(part.features, self.store.block(handle))
            (sealed,) = await self.store.seal(request_id, [SealItem(handle, used)])
            items.append(Item(part.modality, key, sealed, part.placeholder))
        chosen = {"max_tokens": len(question.answer) + 8, **sampling}
        greedy = msgspec.convert(chosen, Sampling)
        return EngineRequest(request_id, list(question.token_ids), items, greedy)

    async def ask(self, question: Question, **sampling: object) -> Said:
        """Run a request as frontends do: they forget their pins when it is accepted."""
        request = await self.place(question, **sampling)
        try:
            async with self.accepted(request) as events:
                self.store.forget(request.request_id)
                return await self.rest(events)
        finally:
            self.store.forget(request.request_id)

    @asynccontextmanager
    async def accepted(self, request: EngineRequest) -> AsyncIterator[Events]:
        """Yield the events after `Accepted`. Leaving early aborts the request."""
        events = self.engine.submit(request)
        try:
            first = await self.next(events)
            require(isinstance(first, Accepted), f"the first event is {first}, not Accepted")
            yield events
        finally:
            await events.aclose()

    async def next(self, events: Events) -> EngineEvent | None:
        """Return the next event in time; ``None`` after the last."""
        try:
            async with asyncio.timeout(self.subject.timeout_s):
                return await anext(events, None)
        except TimeoutError:
            raise NotConforming("the engine says nothing more") from None

    async def rest(self, events: Events) -> Said:
        """Return all that comes after `Accepted`, and check its order."""
        said = Said()
        while (event := await self._next_of_accepted(events)) is not None:
            require(not said.reason, f"{event} comes after Finished")
            match event:
                case Tokens(token_ids, _, logprobs):
                    require(bool(token_ids), "an event brings no tokens")
                    said.token_ids += token_ids
                    said.logprobs += logprobs
                case Finished(reason):
                    said.reason = reason
                case _:
                    raise NotConforming("a request is accepted twice")
        require(bool(said.reason), "the answer ends without Finished")
        return said

    async def _next_of_accepted(self, events: Events) -> EngineEvent | None:
        try:
            return await self.next(events)
        except AfferentError as error:
            raise NotConforming(f"a request that was accepted fails: {error!r}") from error

    async def overwrite(self, handles: Sequence[Handle]) -> None:
        """Evict all unpinned memory, and overwrite the bytes of ``handles`` in it."""
        await self.store.evict(ObjectKind.FEATURES)
        try:
            while free_nbytes := await self._largest_free_nbytes():
                wanted = CreateItem(ObjectKind.FEATURES, free_nbytes)
                (filler,) = await self.store.create(_FILLER, [wanted])
                block = np.frombuffer(self.store.block(filler), np.uint8)
                for handle in handles:
                    start = max(handle.offset - filler.offset, 0)
                    block[start : max(handle.offset + handle.nbytes - filler.offset, 0)] = 0xA5
        except StoreFull:  # the rest is reserved
            pass

    async def _largest_free_nbytes(self) -> int:
        return (await self.store.stat()).kinds[ObjectKind.FEATURES].largest_free_nbytes

    async def stop_overwriting(self) -> None:
        await self.store.release(_FILLER)

    async def held_nbytes(self) -> int:
        """Return the bytes of pinned features, of all clients."""
        return (await self.store.stat()).kinds[ObjectKind.FEATURES].held_nbytes

    async def require_nothing_held(self, after: str) -> None:
        """Require that all features are unpinned within ``settle_s``."""
        deadline = self._settled_at()
        while held := await self.held_nbytes():
            if asyncio.get_running_loop().time() > deadline:
                raise NotConforming(f"{held} bytes of features are still held {after}")
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def require_gone(self) -> None:
        """Require that the engine has no info within ``settle_s``."""
        deadline = self._settled_at()
        while self.engine.info is not None:
            if asyncio.get_running_loop().time() > deadline:
                raise NotConforming("an engine that is gone still has an info")
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _settled_at(self) -> float:
        return asyncio.get_running_loop().time() + self.subject.settle_s


def require(condition: bool, otherwise: str) -> None:
    """Require a condition.

    Raises:
        NotConforming: The condition does not hold.
    """
    if not condition:
        raise NotConforming(otherwise)


def require_answer(said: Said, question: Question) -> None:
    expected = question.answer
    require(said.token_ids == expected, f"the answer is {said.token_ids}, not {expected}")
    require(said.reason == "stop", f"a complete answer ends with {said.reason!r}, not 'stop'")
