"""An engine in a process of its own: what comes over the socket is what it does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from afferent.engine.contract import Caller
from afferent.engine.protocol import (
    Accepted,
    Engine,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Finished,
    Tokens,
)
from afferent.engine.reference.kind import ReferenceEngine
from afferent.engine.remote import messages as m
from afferent.engine.remote.host import EngineHost
from afferent.engine.remote.kind import RemoteLink
from afferent.errors import EngineUnavailable, InternalError, StaleHandle
from afferent.runtime import wire
from afferent.types import Sampling, TokenLogprobs, encode

INFO = EngineInfo(100, [2], unsupported=("seed",))
TOKENS = Tokens([5], [], [TokenLogprobs(-0.5, [(5, -0.5)])])


@dataclass(eq=False)
class Pretend:
    """Does what a request's first token stands for."""

    info: EngineInfo | None = INFO
    ended: list[str] = field(default_factory=list)

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        try:
            match request.token_ids[0]:
                case 1:
                    raise StaleHandle("the features are gone")
                case 2:
                    raise ZeroDivisionError
            yield Accepted()
            yield TOKENS
            if request.token_ids[0] == 3:
                await asyncio.Event().wait()
            yield Finished("length", [])
        finally:
            self.ended.append(request.request_id)

    async def stats(self) -> EngineStats | None:
        return EngineStats(num_running=3)


@dataclass
class Place:
    pretend: Pretend
    host: EngineHost
    engine: Engine
    address: str
    leave: Callable[[], Awaitable[None]]
    """The frontend goes."""


@contextlib.asynccontextmanager
async def place() -> AsyncIterator[Place]:
    link = RemoteLink(address=wire.new_address("pretend"))
    pretend = Pretend()
    host = EngineHost(pretend)
    with wire.listen(link.address) as listener:
        serving = asyncio.create_task(host.serve(listener))
        async with contextlib.AsyncExitStack() as stack:
            caller = Caller(name="frontend", store_address="")
            engine = await stack.enter_async_context(ReferenceEngine().connect(link, caller))
            await until(lambda: engine.info is not None)
            yield Place(pretend, host, engine, link.address, stack.aclose)
        await until(lambda: not host._frontends)
        serving.cancel()
        await asyncio.wait([serving])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def request(what: int, name: str = "r") -> EngineRequest:
    return EngineRequest(name, [what], [], Sampling(max_tokens=1))


def test_all_events_and_figures_arrive() -> None:
    async def run() -> None:
        async with place() as at:
            assert at.engine.info == INFO
            events = [event async for event in at.engine.submit(request(0))]
            assert events == [Accepted(), TOKENS, Finished("length", [])]
            assert await at.engine.stats() == EngineStats(num_running=3)

    asyncio.run(run())


@pytest.mark.parametrize(("what", "error"), [(1, StaleHandle), (2, InternalError)])
def test_errors_keep_their_class(what: int, error: type[Exception]) -> None:
    """What is none of ours is an internal one, and the next request is served."""

    async def run() -> None:
        async with place() as at:
            with pytest.raises(error):
                await anext(at.engine.submit(request(what)))
            events = [event async for event in at.engine.submit(request(0))]
            assert len(events) == 3

    asyncio.run(run())


def test_an_aborted_request_ends() -> None:
    async def run() -> None:
        async with place() as at:
            events = at.engine.submit(request(3))
            assert await anext(events) == Accepted()
            await events.aclose()
            await until(lambda: at.pretend.ended == ["r"])

    asyncio.run(run())


def test_the_requests_of_a_frontend_that_goes_end() -> None:
    async def run() -> None:
        async with place() as at:
            events = at.engine.submit(request(3))
            assert await anext(events) == Accepted()
            await at.leave()
            await until(lambda: at.pretend.ended == ["r"])
            with pytest.raises(EngineUnavailable):
                [event async for event in events]

    asyncio.run(run())


def test_a_change_is_announced() -> None:
    async def run() -> None:
        async with place() as at:
            at.pretend.info = None
            at.host.announce()
            await until(lambda: at.engine.info is None)
            with pytest.raises(EngineUnavailable):
                await anext(at.engine.submit(request(0)))

    asyncio.run(run())


def test_who_was_refused_may_come_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As fast as can be: when the refusal is on its way."""

    async def run() -> None:
        async with place() as at:
            (frontend,) = at.host._frontends
            said: list[str] = []
            send = frontend.send

            def send_and_come_again(message: Any) -> None:
                send(message)
                said.append(message.failure.code)
                if len(said) < 3:
                    frontend._on_frame(encode(m.Submit(request(1))))

            monkeypatch.setattr(frontend, "send", send_and_come_again)
            frontend._on_frame(encode(m.Submit(request(1))))
            await until(lambda: len(said) == 3)
            assert said == ["stale_handle"] * 3
            await until(lambda: not frontend._running)

    asyncio.run(run())


@pytest.mark.parametrize(
    "messages", [[m.Submit(request(3)), m.Submit(request(3))], [m.Health(INFO)]]
)
def test_who_breaks_the_protocol_is_cut_off(messages: list[Any]) -> None:
    """Answers of two requests of one id would be mixed up."""

    async def run() -> None:
        async with place() as at:
            gone = asyncio.Event()
            channel = wire.AsyncChannel(lambda _: None, gone.set)
            await channel.attach(wire.connect(at.address, timeout_s=5))
            for message in (m.FrontendHello("other"), *messages):
                channel.send(encode(message))
            async with asyncio.timeout(30):
                await gone.wait()
            assert at.engine.info == INFO

    asyncio.run(run())
