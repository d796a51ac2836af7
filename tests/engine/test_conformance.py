"""The conformance suite passes the example engine, and catches engines that break a promise."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from afferent.conformance.engine import CHECKS, check
from afferent.conformance.engine_trial import NotConforming, Part, Question, Subject
from afferent.engines.protocol import (
    Accepted,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    Finished,
    Tokens,
)
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.types import MiB, Modality, ObjectKind, Placeholder
from examples import tiny_engine as tiny

EXAMPLE = Path(tiny.__file__)


@pytest.fixture(scope="module")
def server() -> Iterator[StoreServer]:
    with StoreServer(4 * MiB, shares={ObjectKind.FEATURES: 1.0}) as made:
        yield made


def question(number: int) -> Question:
    """Return a question about two images of one colour, with the expected answer."""
    colours = [(number % 256, 10, 250), (3, (7 * number) % 256, 77)]
    parts = [
        Part(Modality.IMAGE, tiny.plain_image(colour, 24), placeholder)
        for colour, placeholder in zip(colours, (Placeholder(1, 4), Placeholder(6, 4)), strict=True)
    ]
    return Question([1] * 12, parts, [*colours[0], *colours[1]])


@asynccontextmanager
async def subject(server: StoreServer, engine_type: Any) -> AsyncIterator[Subject]:
    store = await AsyncDaemonStore.connect(server.address, name="engine")
    engine = engine_type(store)
    try:
        yield Subject(
            engine=engine,
            store_address=server.address,
            question=question,
            stop=engine.close,
            text=lambda tokens: " ".join(map(str, tokens)),
            timeout_s=5.0,
            settle_s=1.0,
        )
    finally:
        await store.close()


def run(name: str, server: StoreServer, engine_type: Any) -> None:
    async def run() -> None:
        async with subject(server, engine_type) as made:
            await check(name, made)

    asyncio.run(run())


@pytest.mark.parametrize("name", CHECKS)
def test_the_tiny_engine_conforms(name: str, server: StoreServer) -> None:
    run(name, server, tiny.TinyEngine)


# Engines that break a promise


class _OtherStore:
    """A store with some methods replaced."""

    def __init__(self, store: AsyncDaemonStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class TakesNoPins(tiny.TinyEngine):
    def __init__(self, store: AsyncDaemonStore) -> None:
        class Store(_OtherStore):
            async def get(self, *_: Any) -> None:
                pass

        super().__init__(Store(store))


class LetsGoTooEarly(tiny.TinyEngine):
    """An engine that unpins the features before it reads them."""

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        handles = [item.handle for item in request.items]
        await self._store.get(request.request_id, handles)
        self._store.forget(request.request_id)
        async for event in TakesNoPins(self._store).submit(request):
            yield event


class AcceptsTwice(tiny.TinyEngine):
    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        async for event in super().submit(request):
            yield event
            if isinstance(event, Accepted):
                yield event


class NeverAccepts(tiny.TinyEngine):
    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        async for event in super().submit(request):
            if not isinstance(event, Accepted):
                yield event


class AcceptsBeforeItLooks(tiny.TinyEngine):
    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        yield Accepted()
        async for event in super().submit(request):
            if not isinstance(event, Accepted):
                yield event


class LeaksOnAbort(tiny.TinyEngine):
    """An engine that does not unpin the features of an aborted request."""

    def __init__(self, store: AsyncDaemonStore) -> None:
        class Store(_OtherStore):
            def forget(self, request: str) -> None:
                pass

        super().__init__(Store(store))
        self._real_store = store

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        async for event in super().submit(request):
            if isinstance(event, Finished):
                self._real_store.forget(request.request_id)
            yield event


class LetsGoTooLate(LeaksOnAbort):
    """An engine that unpins only when the stream of events is closed."""

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        async with aclosing(super().submit(request)) as events:
            try:
                async for event in events:
                    yield event
            finally:
                self._real_store.forget(request.request_id)


class ForgetsTheLimit(tiny.TinyEngine):
    def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        sampling = msgspec.structs.replace(request.sampling, max_tokens=100)
        return super().submit(msgspec.structs.replace(request, sampling=sampling))


class SaysTheEnd(tiny.TinyEngine):
    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        async for event in super().submit(request):
            if isinstance(event, Finished) and event.reason == "stop":
                yield Tokens([tiny.EOS], [])
            yield event


class GoesOnWhenClosed(tiny.TinyEngine):
    def _check_running(self) -> None:
        pass


class TrustsPlaceholders(tiny.TinyEngine):
    def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        longer = [*request.token_ids, 1, 1, 1]
        return super().submit(msgspec.structs.replace(request, token_ids=longer))


class HasNoLogprobs(tiny.TinyEngine):
    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        async for event in super().submit(request):
            yield Tokens(event.token_ids, []) if isinstance(event, Tokens) else event


class DeclaresNoLogprobs(HasNoLogprobs):
    def __init__(self, store: AsyncDaemonStore) -> None:
        super().__init__(store)
        self.info = EngineInfo(4096, [tiny.EOS], unsupported=("num_logprobs",))


def test_what_is_said_to_be_unsupported_is_not_asked_for(server: StoreServer) -> None:
    run("gives_logprobs_when_asked", server, DeclaresNoLogprobs)


class DoesMore(tiny.TinyEngine):
    """An engine that supports stop tokens, a minimal length, and biases (the answer is then 1)."""

    def __init__(self, store: AsyncDaemonStore) -> None:
        super().__init__(store)
        supported = ("stop_token_ids", "min_tokens", "logit_bias")
        self.info = EngineInfo(4096, [tiny.EOS], supported=supported)

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        sampling = request.sampling
        goes_on = msgspec.structs.replace(sampling, ignore_eos=True)
        num_said = 0
        events = super().submit(msgspec.structs.replace(request, sampling=goes_on))
        async with aclosing(events):
            async for event in events:
                if not isinstance(event, Tokens):
                    yield event
                    continue
                (token,) = event.token_ids
                is_end = token == tiny.EOS and not sampling.ignore_eos
                if num_said >= sampling.min_tokens and (is_end or token in sampling.stop_token_ids):
                    yield Finished("stop", [], token)
                    return
                num_said += 1
                is_biased = token in dict(sampling.logit_bias)
                yield Tokens([1], [], event.logprobs) if is_biased else event


@pytest.mark.parametrize("name", CHECKS)
def test_one_that_does_more_conforms_too(name: str, server: StoreServer) -> None:
    run(name, server, DoesMore)


def says(field: Any) -> Any:
    """Return an engine that declares support of a sampling parameter, but ignores it."""

    class Says(tiny.TinyEngine):
        def __init__(self, store: AsyncDaemonStore) -> None:
            super().__init__(store)
            self.info = EngineInfo(4096, [tiny.EOS], supported=(field,))

    return Says


BROKEN = [
    (says("stop_token_ids"), "does_what_it_supports"),
    (says("min_tokens"), "does_what_it_supports"),
    (says("logit_bias"), "does_what_it_supports"),
    (says("json_schema"), "does_what_it_supports"),
    (says("regex"), "does_what_it_supports"),
    (says("choice"), "does_what_it_supports"),
    (TakesNoPins, "keeps_what_it_accepted"),
    (TakesNoPins, "keeps_what_others_share"),
    (LetsGoTooEarly, "keeps_what_it_accepted"),
    (AcceptsTwice, "accepts_once_and_first"),
    (NeverAccepts, "accepts_once_and_first"),
    (AcceptsBeforeItLooks, "refuses_stale_handles"),
    (AcceptsBeforeItLooks, "refuses_wrong_placeholders"),
    (LeaksOnAbort, "gives_back_when_closed_after_acceptance"),
    (LeaksOnAbort, "gives_back_when_closed_between_tokens"),
    (LeaksOnAbort, "answers_many_at_once"),
    (LetsGoTooLate, "gives_back_when_encoded"),
    (ForgetsTheLimit, "respects_max_tokens"),
    (SaysTheEnd, "respects_the_end_of_sequence"),
    (HasNoLogprobs, "gives_logprobs_when_asked"),
    (TrustsPlaceholders, "refuses_wrong_placeholders"),
    (GoesOnWhenClosed, "says_when_it_is_unavailable"),
]


@pytest.mark.parametrize(("engine_type", "name"), BROKEN)
def test_a_broken_promise_is_found(engine_type: Any, name: str, server: StoreServer) -> None:
    with pytest.raises(NotConforming):
        run(name, server, engine_type)


def test_the_example_shows_who_holds_the_features() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLE],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-3:] == [
        "aborted: 703,312 bytes of features, pinned by frontend",
        "  Accepted, pinned by engine",
        "  the end, pinned by nobody",
    ]
