"""Response formats in the core: compiled once, within limits, by a process that may die."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from afferent.admission.shares import Share
from afferent.builtin.engine import messages as m
from afferent.builtin.engine.core import forms as core_forms
from afferent.engines.protocol import EngineInfo, EngineRequest
from afferent.errors import EngineUnavailable, InternalError, InvalidForm
from afferent.runtime import wire
from afferent.store.daemon.server import StoreServer
from afferent.types import Failure, MiB, ObjectKind, decode, encode
from tests.engine.pretend import EOS, Bench, bench_of, request, tokens_of
from tests.waiting import until

INFO = EngineInfo(4096, [EOS], embed_nbytes=100, supported=("regex",))
WRONG = Failure(InvalidForm.code, "no such form")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with StoreServer(4 * MiB, shares={ObjectKind.FEATURES: 1.0}) as server:
        yield server.address


class Trier:
    """A compile process that refuses formats with an x; it answers only while `hold` is set."""

    def __init__(self) -> None:
        self.asked: list[m.TryForm] = []
        self.hold = asyncio.Event()
        self.hold.set()
        self.is_cut = asyncio.Event()
        self.failure = WRONG
        self.channel = wire.AsyncChannel(self._on_frame, self.is_cut.set)
        self._tasks: set[asyncio.Task[None]] = set()

    async def come(self, bench: Bench) -> None:
        sock = await asyncio.to_thread(wire.connect, bench.core_address, timeout_s=30.0)
        await self.channel.attach(sock)
        self.channel.send(encode(m.FormsHello()))
        await until(lambda: bench.core.forms._channel is not None)

    async def leave(self, bench: Bench) -> None:
        self.channel.abort()
        await self.is_cut.wait()
        await until(lambda: bench.core.forms._channel is None)

    def _on_frame(self, frame: bytes) -> None:
        asked = decode(m.to_forms_decoder, frame)
        self.asked.append(asked)
        task = asyncio.create_task(self._answer(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, asked: m.TryForm) -> None:
        await self.hold.wait()
        failure = self.failure if "x" in asked.form.text else None
        if self.channel.is_open:
            self.channel.send(encode(m.FormTried(asked.number, failure, 700)))


@contextlib.asynccontextmanager
async def ready(address: str) -> AsyncIterator[tuple[Bench, Trier]]:
    async with bench_of(address, info=INFO) as bench:
        await bench.add_worker()
        await bench.ready()
        trier = Trier()
        await trier.come(bench)
        try:
            yield bench, trier
        finally:
            await trier.leave(bench)


def test_a_form_is_tried_once(address: str) -> None:
    async def run() -> None:
        async with ready(address) as (bench, trier):
            trier.hold.clear()
            asked = [request(f"a{n}", 9, regex="a") for n in range(5)]
            asked += [request(f"x{n}", 9, regex="x") for n in range(3)]
            answers = [asyncio.create_task(tokens_of(bench, each)) for each in asked]
            await until(lambda: len(trier.asked) == 2)
            assert await tokens_of(bench, request("plain", 9)) == [9, 10, 11], "others go on"
            trier.hold.set()
            said = await asyncio.gather(*answers, return_exceptions=True)
            assert said[:5] == [[9, 10, 11]] * 5
            for error in said[5:]:
                assert isinstance(error, InvalidForm)
                assert error.message == "no such form"
            with pytest.raises(InvalidForm):
                await tokens_of(bench, request("y", 9, regex="x"))
            assert len(trier.asked) == 2
            begun = [b for work in bench.workers[0].works for b in work.begin]
            assert {b.sequence_id: b.form_nbytes for b in begun} == {
                **{f"a{n}": 700 for n in range(5)},
                "plain": 0,
            }

    asyncio.run(run())


def test_who_tries_may_go_and_come(address: str) -> None:
    async def run() -> None:
        async with ready(address) as (bench, trier):
            trier.hold.clear()
            asked = asyncio.create_task(tokens_of(bench, request("a", 9, regex="a")))
            await until(lambda: trier.asked)
            await trier.leave(bench)
            with pytest.raises(EngineUnavailable):
                await asked
            with pytest.raises(EngineUnavailable):
                await tokens_of(bench, request("b", 9, regex="a"))
            assert await tokens_of(bench, request("plain", 9)) == [9, 10, 11]
            await (await ready_again(bench)).leave(bench)
            assert await tokens_of(bench, request("c", 9, regex="a")) == [9, 10, 11], "it is known"

    async def ready_again(bench: Bench) -> Trier:
        trier = Trier()
        await trier.come(bench)
        assert await tokens_of(bench, request("d", 9, regex="a")) == [9, 10, 11]
        return trier

    asyncio.run(run())


def test_what_is_no_fault_of_the_form_is_not_kept(address: str) -> None:
    async def run() -> None:
        async with ready(address) as (bench, trier):
            trier.failure = Failure(InternalError.code, "it could not be tried")
            for number in range(2):
                with pytest.raises(InternalError):
                    await tokens_of(bench, request(f"x{number}", 9, regex="x"))
            assert len(trier.asked) == 2

    asyncio.run(run())


def test_bounds(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_forms, "_MAX_WAITING", 2)
    monkeypatch.setattr(core_forms, "_MAX_KNOWN", 3)

    async def run() -> None:
        async with ready(address) as (bench, trier):
            trier.hold.clear()
            asked = [
                asyncio.create_task(tokens_of(bench, request(f"a{n}", 9, regex="a" * (n + 1))))
                for n in range(3)
            ]
            await until(lambda: len(bench.core.forms._waiting) == 1)
            with pytest.raises(EngineUnavailable):
                await tokens_of(bench, request("b", 9, regex="b"))
            trier.hold.set()
            await asyncio.gather(*asked)
            for number in range(4):
                await tokens_of(bench, request(f"c{number}", 9, regex="c" * (number + 1)))
            assert len(bench.core.forms._known) == 3
            await tokens_of(bench, request("d", 9, regex="c"))
            assert len(trier.asked) == 8, "what was asked for longest ago is tried again"

    asyncio.run(run())


def test_a_tenant_with_many_forms_is_not_before_others(address: str) -> None:
    async def run() -> None:
        async with ready(address) as (bench, trier):
            trier.hold.clear()
            asked = [
                asyncio.create_task(tokens_of(bench, of("many", f"a{number}")))
                for number in range(12)
            ]
            await until(lambda: len(bench.core.forms._waiting) == 10)
            asked.append(asyncio.create_task(tokens_of(bench, of("one", "b"))))
            await until(lambda: len(bench.core.forms._waiting) == 11)
            assert len(trier.asked) == 2, "a few at a time"
            trier.hold.set()
            await asyncio.gather(*asked)
            assert "b" in [each.form.text for each in trier.asked[:4]]

    def of(tenant: str, regex: str) -> EngineRequest:
        asked = request(f"{tenant}-{regex}", 9, regex=regex)
        return msgspec.structs.replace(asked, share=Share(tenant))

    asyncio.run(run())


def test_an_abort_meanwhile(address: str) -> None:
    async def run() -> None:
        async with ready(address) as (bench, trier):
            trier.hold.clear()
            events = bench.client.submit(request("a", 9, regex="a"))
            waiting = asyncio.ensure_future(anext(events))
            await until(lambda: trier.asked)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await events.aclose()
            trier.hold.set()
            assert await tokens_of(bench, request("b", 9, regex="a")) == [9, 10, 11]
            assert [b.sequence_id for work in bench.workers[0].works for b in work.begin] == ["b"]

    asyncio.run(run())


def test_a_stranger_is_cut_off(address: str) -> None:
    async def run() -> None:
        async with ready(address) as (bench, trier):
            trier.channel.send(encode(m.FormsHello()))
            await trier.is_cut.wait()
            assert await tokens_of(bench, request("plain", 9)) == [9, 10, 11]

    asyncio.run(run())
