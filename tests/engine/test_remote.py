"""An engine in another process behaves over the socket as it does directly."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from afferent.builtin.engine.kind import ReferenceEngine
from afferent.engines.contract import Caller
from afferent.engines.protocol import (
    Accepted,
    Engine,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    EngineStats,
    Finished,
    Tokens,
)
from afferent.engines.remote import client, host
from afferent.engines.remote import messages as m
from afferent.engines.remote.host import EngineHost
from afferent.engines.remote.kind import RemoteLink
from afferent.errors import ConfigError, EngineUnavailable, InternalError, StaleHandle
from afferent.runtime import wire
from afferent.runtime.logs import Seldom
from afferent.runtime.sockets import new_address
from afferent.types import Sampling, TokenLogprobs, encode
from tests.waiting import until

INFO = EngineInfo(100, [2], unsupported=("seed",))
CALLER = Caller(name="frontend", store_address="")
TOKENS = Tokens([5], [], [TokenLogprobs(-0.5, [(5, -0.5)])])


@dataclass(eq=False)
class Pretend:
    """An engine that behaves as the first token of the request selects."""

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
    """Disconnect the frontend."""


@contextlib.asynccontextmanager
async def place() -> AsyncIterator[Place]:
    link = RemoteLink(address=new_address("pretend"))
    pretend = Pretend()
    host = EngineHost(pretend)
    with wire.listen(link.address) as listener:
        serving = asyncio.create_task(host.serve(listener))
        async with contextlib.AsyncExitStack() as stack:
            engine = await stack.enter_async_context(ReferenceEngine().connect(link, CALLER))
            await until(lambda: engine.info is not None)
            yield Place(pretend, host, engine, link.address, stack.aclose)
        await until(lambda: not host._frontends)
        serving.cancel()
        await asyncio.wait([serving])


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
    """A foreign exception becomes an internal error, and the next request is served."""

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
    """The client sends the id again while the refusal is on its way."""

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
    """Else answers of two requests with one id would be mixed up."""

    async def run() -> None:
        async with place() as at:
            gone = asyncio.Event()
            channel = wire.AsyncChannel(lambda _: None, gone.set)
            await channel.attach(wire.connect(at.address, timeout_s=5))
            for message in (m.FrontendHello(m.VERSION, "other"), *messages):
                channel.send(encode(message))
            async with asyncio.timeout(30):
                await gone.wait()
            assert at.engine.info == INFO

    asyncio.run(run())


# Mistakes of an engine's author


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"unsupported": ("logprobs",)}, "EngineInfo.unsupported: .*'logprobs'.*, num_logprobs$"),
        ({"modalities": ("picture",)}, "EngineInfo.modalities: .*; allowed are image, audio, vid"),
        ({"max_model_len": "4096"}, "EngineInfo.max_model_len: Expected `int`, got `str`"),
        ({"eos_token_ids": 2}, "EngineInfo.eos_token_ids: Expected `array`, got `int`"),
        ({"embed_nbytes": object()}, "EngineInfo.embed_nbytes: "),
    ],
)
def test_an_info_that_no_frontend_could_read_is_refused_where_it_is_made(
    wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineInfo(**{"max_model_len": 1, "eos_token_ids": [], **wrong})


def test_an_engine_that_lacks_a_part_is_not_hosted() -> None:
    class Half:
        info = INFO

    with pytest.raises(ConfigError, match=r"Half .* it has no submit and no stats"):
        EngineHost(Half())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), OSError(24, "too many open files")]
)
def test_who_is_out_of_threads_or_files_connects_later(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    refused: list[Exception] = []
    real = client.open_in_thread

    async def open_in_thread(*args: Any) -> Any:
        if len(refused) < 2:
            refused.append(error)
            raise error
        return await real(*args)

    async def run() -> None:
        async with place() as at:
            assert at.engine.info == INFO
            assert len(refused) == 2

    monkeypatch.setattr(client, "open_in_thread", open_in_thread)
    monkeypatch.setattr(client, "_RECONNECT_S", 0.01)
    asyncio.run(run())


def test_what_can_not_be_understood_is_named_and_asked_for_ever_less_often(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pauses between the tries grow until the message can be decoded."""
    pauses: list[float] = []
    info = [100, [2], 0, True, False, 0, ["image"], ["logprobs"]]
    said = [encode(["health", info])] * 6 + [encode(m.Health(INFO))]

    async def pause(duration_s: float) -> None:
        pauses.append(duration_s)
        await asyncio.sleep(0)

    async def run() -> None:
        address = new_address("foreign")
        with wire.listen(address) as listener:
            listener.setblocking(False)
            async with ReferenceEngine().connect(RemoteLink(address=address), CALLER):
                for frame in said:
                    connected = await accept(listener)
                    connected.send(wire.pack_frame(frame))
                    assert await asyncio.get_running_loop().sock_recv(connected, 100), "a hello"
                    connected.close()
                await until(lambda: len(pauses) == len(said))

    monkeypatch.setattr(client, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": pause}))
    asyncio.run(run())
    assert pauses == pytest.approx([0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 0.2])
    reasons = [record.reason for record in caplog.records if hasattr(record, "reason")]
    assert len(reasons) == 6
    assert reasons[0].startswith("the engine's message 'health': Invalid enum value 'logprobs'")


async def accept(listener: socket.socket) -> socket.socket:
    connected, _ = await asyncio.get_running_loop().sock_accept(listener)
    connected.setblocking(False)
    return connected


# Other versions


@pytest.mark.parametrize(
    "hello", [["frontend", "of old"], ["frontend", 99, "newer"], ["frontend", 99, {"name": "x"}]]
)
def test_frontend_of_another_version_is_refused(
    hello: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with place() as at:
            heard: asyncio.Queue[bytes] = asyncio.Queue()
            channel = wire.AsyncChannel(heard.put_nowait, lambda: None)
            await channel.attach(wire.connect(at.address, timeout_s=5))
            channel.send(encode(hello))
            answer = m.from_engine(await asyncio.wait_for(heard.get(), 30))
            assert answer == m.Refused(m.VERSION)
            await channel.close()

    monkeypatch.setattr(host, "_seldom", Seldom(host.log))
    asyncio.run(run())
    theirs = "version 99" if hello[1] == 99 else "an unknown version"
    assert (
        f"a frontend speaks {theirs} of the protocol, the engine version {m.VERSION}: "
        in caplog.text
    )


def test_frontend_refused_by_a_newer_engine_says_so() -> None:
    async def run() -> None:
        address = new_address("newer")
        with wire.listen(address) as listener:

            async def serve() -> None:
                async for sock, _ in wire.accept_peers(listener):
                    channel = wire.AsyncChannel(lambda _: None, lambda: None)
                    await channel.attach(sock)
                    channel.send(encode(m.Refused(99)))

            serving = asyncio.create_task(serve())
            engine = client.RemoteEngine(address, name="frontend")
            running = asyncio.create_task(engine.run())
            await until(lambda: engine._refusal)
            with pytest.raises(EngineUnavailable) as raised:
                await anext(engine.submit(request(0)))
            assert raised.value.message == (
                f"the engine speaks version 99 of the protocol, this frontend version {m.VERSION}: "
                "upgrade Afferent where this frontend runs, and restart this frontend"
            )
            for task in (running, serving):
                task.cancel()
            await asyncio.wait([running, serving])

    asyncio.run(run())
