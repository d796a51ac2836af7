"""The core between a real store and pretended workers: pins, steps and failures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from afferent import keys
from afferent.builtin.engine import messages as m
from afferent.builtin.engine.core import loop, ranks
from afferent.builtin.engine.core.pins import Wanted
from afferent.builtin.engine.kv_budget import KvBudget
from afferent.engines.protocol import Accepted, EngineInfo, EngineRequest, KeptSession, Tokens
from afferent.engines.remote import messages as remote
from afferent.errors import (
    DeadlineExceeded,
    EncoderCacheFull,
    EngineUnavailable,
    FormatError,
    InternalError,
    SessionLost,
    StaleHandle,
    StoreRestarted,
    WorkerDied,
)
from afferent.runtime import wire
from afferent.store.block import codec
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.items import SealItem
from afferent.types import ContentKey, CreateItem, MiB, ObjectKind, Sampling, encode
from tests.engine.pretend import EOS, ROW_NBYTES, bench_of, key_of, request, tokens_of
from tests.waiting import until

SHARES = {ObjectKind.RAW: 0.25, ObjectKind.FEATURES: 0.5, ObjectKind.EMBEDDINGS: 0.25}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with StoreServer(4 * MiB, shares=SHARES) as server:
        yield server.address


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the workers that the core kills, instead of killing them: they are in this process."""
    pidfds: list[int] = []

    def kill(pidfd: int) -> None:
        pidfds.append(pidfd)
        os.close(pidfd)

    monkeypatch.setattr(ranks, "_kill", kill)
    monkeypatch.setattr(ranks, "_GRACE_S", 0.0)
    return pidfds


def test_features_are_let_go_of_when_they_are_encoded(address: str) -> None:
    async def run() -> None:
        async with bench_of(address) as bench:
            worker = await bench.add_worker()
            await bench.ready()
            await bench.put(b"a-dog")
            worker.hold.clear()
            wanted = request("a", 10, [await bench.item(b"a-dog", 2, 4)], max_tokens=20)
            events = bench.client.submit(wanted)
            assert isinstance(await anext(events), Accepted)
            await until(lambda: len(worker.works) == 1)
            assert await bench.num_pinned() == 1, "the core's pin, and the worker's"
            assert worker.works[0].pinned_for == [worker.store.client_number]
            assert not worker.works[0].prefill, "what needs the item goes out later"
            worker.hold.set()
            assert isinstance(await anext(events), Tokens)
            await bench.until_nothing_is_pinned()
            (begin,) = worker.works[0].begin
            assert begin.items[0].grids["image_grid_thw"].shape == (1, 3)
            await events.aclose()
            await until(lambda: any(work.drop == ["a"] for work in worker.works))

    asyncio.run(run())


def test_features_are_let_go_of_item_by_item(address: str) -> None:
    """An item that occurs twice in the prompt is pinned twice, and unpinned after each."""

    async def run() -> None:
        async with bench_of(address, max_num_batched_tokens=16) as bench:
            worker = await bench.add_worker()
            await bench.ready()
            names = (b"i-first", b"i-second", b"i-first", b"i-third")
            await bench.put(*dict.fromkeys(names))
            items = [await bench.item(name, 16 * at + 2, 4) for at, name in enumerate(names)]
            worker.pauses_at = lambda work: key_of(b"i-third") in [i.key for i in work.encode]
            asked = asyncio.create_task(tokens_of(bench, request("a", 70, items)))
            await until(lambda: not worker.hold.is_set())
            assert [info.key for info in await bench.pinned()] == [key_of(b"i-third")]
            worker.hold.set()
            await asked
            await bench.until_nothing_is_pinned()

    asyncio.run(run())


def test_an_item_is_encoded_once_for_all(address: str) -> None:
    async def run() -> None:
        async with bench_of(address, num_workers=2, max_num_batched_tokens=16) as bench:
            for rank in (1, 0):
                await bench.add_worker(rank)
            await bench.ready()
            await bench.put(b"b-dog")
            one = await bench.item(b"b-dog", 2, 4)
            two = await bench.item(b"b-dog", 20, 4)
            asked = [request(f"r{n}", 30, [one, two]) for n in range(3)]
            answers = await asyncio.gather(*(tokens_of(bench, each) for each in asked))
            assert answers == [[30, 31, 32]] * 3
            stats = await bench.client.stats()
            assert stats is not None
            assert stats.num_encoded == [1, 1]
            assert stats.num_prompt_tokens == 90
            assert stats.num_decode_tokens == 6
            assert stats.cache_nbytes == 400
            told = [work for work in bench.workers[0].works if work.prefill]
            assert all(sum(c.num_tokens for c in work.prefill) <= 16 for work in told)
            assert sum(len(work.begin) for work in bench.workers[0].works) == 3
            assert bench.workers[0].works == bench.workers[1].works
            await bench.until_nothing_is_pinned()

    asyncio.run(run())


def test_a_bad_item_fails_those_who_hold_it(address: str) -> None:
    async def run() -> None:
        async with bench_of(address, num_workers=2) as bench:
            workers = [await bench.add_worker(rank) for rank in range(2)]
            workers[1].bad = {key_of(b"c-bad")}  # only one of the workers fails
            await bench.ready()
            await bench.put(b"c-bad", b"c-good")
            bad, good = await bench.item(b"c-bad", 0, 4), await bench.item(b"c-good", 4, 4)
            asked = [request("a", 9, [bad, good]), request("b", 8, [bad]), request("c", 9, [good])]
            answers = await asyncio.gather(
                *(tokens_of(bench, each) for each in asked), return_exceptions=True
            )
            assert [type(answer) for answer in answers] == [InternalError, InternalError, list]
            computed = {chunk.sequence_id for work in workers[0].works for chunk in work.prefill}
            assert computed == {"c"}, "nobody computes without the item"
            assert workers[0].embeddings == {key_of(b"c-good")}, "what only one has is forgotten"
            await bench.until_nothing_is_pinned()

    asyncio.run(run())


def test_a_sequence_that_one_worker_can_not_begin_is_computed_by_none(address: str) -> None:
    """The ranks would wait for each other in the layers."""

    async def run() -> None:
        async with bench_of(address, num_workers=2) as bench:
            workers = [await bench.add_worker(rank) for rank in range(2)]
            workers[1].cannot_begin = {"a"}
            await bench.ready()
            answers = await asyncio.gather(
                *(tokens_of(bench, request(name, 9)) for name in "ab"), return_exceptions=True
            )
            assert [type(answer) for answer in answers] == [InternalError, list]
            for worker in workers:
                assert {c.sequence_id for work in worker.works for c in work.prefill} == {"b"}
            assert await tokens_of(bench, request("c", 9)) == [9, 10, 11]
            assert not workers[0].known.keys() & {"a"}, "who could begin it has forgotten it"

    asyncio.run(run())


def test_one_worker_is_told_to_begin_and_to_compute_at_once(address: str) -> None:
    async def run() -> None:
        async with bench_of(address) as bench:
            worker = await bench.add_worker()
            worker.cannot_begin = {"a"}
            await bench.ready()
            answers = await asyncio.gather(
                *(tokens_of(bench, request(name, 9)) for name in "ab"), return_exceptions=True
            )
            assert [type(answer) for answer in answers] == [InternalError, list]
            begun = [work for work in worker.works if work.begin]
            for work in begun:
                assert {each.sequence_id for each in work.begin} == {
                    chunk.sequence_id for chunk in work.prefill
                }
            assert {each.sequence_id for work in begun for each in work.begin} == {"a", "b"}

    asyncio.run(run())


@pytest.mark.parametrize("forget_dog", [False, True])
def test_a_preempted_request_begins_again(address: str, forget_dog: bool) -> None:
    """The cache has space for one item: the first is encoded again if its features still exist."""

    async def run() -> None:
        kv_budget = KvBudget(num_tokens=80)
        async with bench_of(address, kv_budget=kv_budget, encoder_cache_nbytes=400) as bench:
            worker = await bench.add_worker()
            await bench.ready()
            await bench.put(b"d-dog", b"d-cat")
            items = [await bench.item(b"d-dog", 0, 4), await bench.item(b"d-cat", 8, 4)]
            worker.pauses_at = lambda work: bool(work.begin) or "b" in work.drop
            a = asyncio.create_task(tokens_of(bench, request("a", 16, max_tokens=64)))
            await until(lambda: not worker.hold.is_set())
            wanted = request("b", 16, items, max_tokens=30, temperature=1.0)
            b = asyncio.create_task(tokens_of(bench, wanted))
            await until(lambda: bench.core._loop and bench.core._loop._scheduler.num_waiting)
            worker.pauses_at = lambda work: "b" in work.drop
            worker.hold.set()
            await until(lambda: not worker.hold.is_set())
            worker.pauses_at = None
            if forget_dog:
                assert await bench.store.delete([key_of(b"d-dog")]) == [True]
            worker.hold.set()
            assert await a == list(range(16, 80))
            if forget_dog:
                with pytest.raises(EngineUnavailable, match="gone"):
                    await b
                await bench.until_nothing_is_pinned()
                return
            assert await b == list(range(16, 46))
            begun = [begin for work in worker.works for begin in work.begin]
            first, again = (begin for begin in begun if begin.sequence_id == "b")
            assert first.sampling.seed is not None
            assert first.sampling == again.sampling
            assert len(again.token_ids) > len(first.token_ids) == 16
            stats = await bench.client.stats()
            assert stats is not None
            assert stats.num_preempted == 1
            assert stats.num_encoded == [4]
            await bench.until_nothing_is_pinned()

    asyncio.run(run())


def test_a_lost_worker_ends_all_and_others_take_over(address: str, killed: list[int]) -> None:
    async def run() -> None:
        async with bench_of(address, num_workers=2) as bench:
            old = [await bench.add_worker(rank) for rank in range(2)]
            await bench.ready()
            old[0].hold.clear()
            await bench.put(b"e-dog")
            dog = await bench.item(b"e-dog", 0, 4)
            asked = asyncio.create_task(tokens_of(bench, request("a", 9, [dog])))
            await until(lambda: old[1].works)
            await old[1].leave()
            with pytest.raises(WorkerDied):
                await asked
            await old[0].is_cut.wait()
            await until(lambda: len(killed) == 2)
            await until(lambda: bench.client.info is None)
            with pytest.raises(EngineUnavailable):
                await tokens_of(bench, request("b", 9))
            for rank in range(2):
                await bench.add_worker(rank)
            await bench.ready()
            old[0].hold.set()  # no process receives its late answer
            assert await tokens_of(bench, request("a", 9, [dog])) == [9, 10, 11]
            stats = await bench.client.stats()
            assert stats is not None
            assert stats.num_restarts == 1
            # A disconnected worker may still read: its pins last until its process ends.
            old[0].store.forget(old[0].works[0].lease)
            old[1].store.forget(old[0].works[0].lease)
            await bench.until_nothing_is_pinned()

    asyncio.run(run())


def test_a_worker_comes_again_before_its_end_was_seen(address: str) -> None:
    async def run() -> None:
        async with bench_of(address) as bench:
            old = await bench.add_worker()
            await bench.ready()
            await bench.add_worker()
            await old.is_cut.wait()
            await bench.ready()
            assert await tokens_of(bench, request("a", 9)) == [9, 10, 11]

    asyncio.run(run())


def test_a_worker_that_hangs_is_noticed(address: str, killed: list[int]) -> None:
    async def run() -> None:
        async with bench_of(address, num_workers=2, step_timeout_s=0.2) as bench:
            workers = [await bench.add_worker(rank) for rank in range(2)]
            await bench.ready()
            workers[1].hold.clear()
            with pytest.raises(WorkerDied):
                await tokens_of(bench, request("a", 9))
            await until(lambda: len(killed) == 2)

    asyncio.run(run())


def test_a_frontend_goes(address: str) -> None:
    async def run() -> None:
        async with bench_of(address, max_num_seqs=1) as bench:
            worker = await bench.add_worker()
            await bench.ready()
            await bench.put(b"f-dog")
            dog = await bench.item(b"f-dog", 0, 4)
            worker.hold.clear()
            asked = [
                asyncio.create_task(tokens_of(bench, request(name, 9, [dog]))) for name in "ab"
            ]
            await until(lambda: worker.works)
            channel = bench.client._channel
            assert channel is not None
            channel.abort()
            for answer in asked:
                with pytest.raises(EngineUnavailable):
                    await answer
            worker.hold.set()
            await bench.ready()
            assert await tokens_of(bench, request("c", 9, [dog])) == [9, 10, 11]
            await bench.until_nothing_is_pinned()

    asyncio.run(run())


def test_a_worker_that_is_new_to_the_store_pins_by_itself(address: str) -> None:
    """The core pins for the worker's old client id; the worker itself pins for the new one."""

    async def run() -> None:
        async with bench_of(address) as bench:
            worker = await bench.add_worker()
            await bench.ready()
            worker.store._channel.abort()
            await until(lambda: not worker.store.is_open)
            await until(lambda: worker.store.is_open)
            await bench.put(b"g-dog", b"g-cat")
            for name in (b"g-dog", b"g-cat"):
                wanted = request(name.decode(), 9, [await bench.item(name, 0, 4)])
                assert await tokens_of(bench, wanted) == [9, 10, 11]
            assert [bool(work.pinned_for) for work in worker.works if work.lease] == [False, True]
            await bench.until_nothing_is_pinned()

    asyncio.run(run())


def test_an_answer_of_the_store_that_comes_too_late_leaves_nothing_pinned(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with bench_of(address) as bench:
            await bench.add_worker()
            await bench.ready()
            await bench.put(b"j-dog")
            store, dog = bench.core._pins._store, await bench.item(b"j-dog", 0, 4)
            get = store.get

            async def get_late(*asked: Any, **more: Any) -> None:
                await get(*asked, **more)
                raise DeadlineExceeded("the store did not answer in time")

            monkeypatch.setattr(store, "get", get_late)
            with pytest.raises(DeadlineExceeded):
                await tokens_of(bench, request("a", 9, [dog]))
            await bench.until_nothing_is_pinned()

    asyncio.run(run())


def test_what_a_former_store_had_fails_alone(address: str) -> None:
    async def run() -> None:
        async with bench_of(address) as bench:
            worker = await bench.add_worker()
            await bench.put(b"k-dog", b"k-cat")
            dog, cat = await bench.item(b"k-dog", 0, 4), await bench.item(b"k-cat", 0, 4)
            assert await bench.store.delete([key_of(b"k-dog")]) == [True]
            former = msgspec.structs.replace(dog.handle, segment=dog.handle.segment + 1)
            dog = msgspec.structs.replace(dog, handle=former)
            pins, clients = bench.core._pins, [worker.store.client_number]
            wanted = [Wanted("a", dog), Wanted("b", cat)]
            held = await pins.hold_step("step", wanted, weights=b"", clients=clients)
            assert [item.sequence_id for item in held.items] == ["b"]
            assert held.pinned_for == clients
            assert held.failed.keys() == {dog.key}
            assert held.failed[dog.key].code == StoreRestarted.code
            pins.let_go("step")
            worker.store.forget("step")
            await bench.until_nothing_is_pinned()

    asyncio.run(run())


def test_what_was_made_again_is_found_by_its_key(address: str) -> None:
    """Else a preempted request would fail all other requests with that item."""

    async def run() -> None:
        async with bench_of(address) as bench:
            worker = await bench.add_worker()
            await bench.put(b"l-dog", b"l-cat")
            gone, cat = await bench.item(b"l-dog", 0, 4), await bench.item(b"l-cat", 0, 4)
            assert await bench.store.delete([key_of(b"l-dog")]) == [True]
            await bench.put(b"l-dog")
            again = await bench.item(b"l-dog", 0, 4)
            assert again.handle != gone.handle
            pins, clients = bench.core._pins, [worker.store.client_number]
            wanted = [Wanted("a", gone), Wanted("b", cat)]
            held = await pins.hold_step("step", wanted, weights=b"", clients=clients)
            assert not held.failed
            assert held.pinned_for == clients
            assert [item.handle for item in held.items] == [again.handle, cat.handle]
            pins.let_go("step")
            worker.store.forget("step")
            await bench.until_nothing_is_pinned()

    asyncio.run(run())


def test_a_worker_that_makes_no_sense_ends_nobody_else(address: str) -> None:
    async def run() -> None:
        async with bench_of(address) as bench:
            await bench.add_worker()
            await bench.ready()
            stranger = await bench.add_worker(rank=1)
            await stranger.is_cut.wait()
            assert await tokens_of(bench, request("a", 9)) == [9, 10, 11]
            stats = await bench.client.stats()
            assert stats is not None
            assert stats.num_restarts == 0

    asyncio.run(run())


def test_a_worker_that_is_ready_twice_is_cut_off(address: str) -> None:
    async def run() -> None:
        async with bench_of(address) as bench:
            worker = await bench.add_worker()
            await bench.ready()
            worker.channel.send(encode(m.WorkerReady(0, worker.info, b"")))
            await worker.is_cut.wait()

    asyncio.run(run())


def test_a_worker_that_has_died_before_it_is_known_is_cut_off() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait(timeout=30)
    them = ranks.Ranks(1, step_timeout_s=1.0, on_ready=lambda: None, on_end=lambda: None)
    channel = wire.AsyncChannel(lambda _: None, lambda: None)
    with socket.socket() as sock, pytest.raises(FormatError, match="died"):
        them.join(m.WorkerHello(0, 0), channel, sock, wire.Peer(ended.pid, os.getuid()))
    assert 0 not in them


def test_embeddings_are_found_in_the_store(address: str) -> None:
    async def run() -> None:
        async with bench_of(address) as bench:
            worker = await bench.add_worker(weights=b"w")
            await bench.ready()
            await bench.put(b"h-dog", b"h-cat")
            name = keys.embeddings_key(item=ContentKey(key_of(b"h-dog")), weights=b"w")
            tree: Any = {"rows": np.ones((4, 8), np.float32), "layers": []}
            nbytes = codec.plan(tree).nbytes
            create = CreateItem(ObjectKind.EMBEDDINGS, nbytes, name)
            (handle,) = await bench.store.create("put", [create])
            codec.write_into(tree, bench.store.block(handle))
            await bench.store.seal("put", [SealItem(handle, nbytes)])
            await bench.store.release("put")
            items = [await bench.item(b"h-dog", 0, 4), await bench.item(b"h-cat", 4, 4)]
            await tokens_of(bench, request("a", 9, items))
            encode = [item for work in worker.works if work.lease for item in work.encode]
            assert [item.found for item in encode] == [True, False]
            assert [item.handle for item in encode] == [handle, items[1].handle]
            stats = await bench.client.stats()
            assert stats is not None
            assert stats.num_embeddings_found == 1
            await bench.until_nothing_is_pinned()

    asyncio.run(run())


def test_what_can_not_be_had_is_refused(address: str) -> None:
    async def run() -> None:
        info = EngineInfo(4096, [EOS], embed_nbytes=10, can_split_items=False)
        async with bench_of(address, info=info, max_num_batched_tokens=20) as bench:
            await bench.add_worker()
            await bench.ready()
            await bench.put(b"i-dog")
            dog = await bench.item(b"i-dog", 0, 17)
            with pytest.raises(EncoderCacheFull, match="17 positions"):
                await tokens_of(bench, request("a", 19, [dog]))
            assert await tokens_of(
                bench, request("b", 19, [await bench.item(b"i-dog", 0, 16)])
            ) == [19, 20, 21]
            await bench.store.delete([key_of(b"i-dog")])
            with pytest.raises(StaleHandle):
                await tokens_of(bench, request("c", 19, [dog]))
            await bench.until_nothing_is_pinned()

    asyncio.run(run())


@pytest.mark.parametrize("hello", [["frontend", "of old"], ["frontend", 99, "newer"]])
def test_frontend_of_another_version_is_refused(address: str, hello: list[Any]) -> None:
    async def run() -> None:
        async with bench_of(address) as bench:
            heard: asyncio.Queue[bytes] = asyncio.Queue()
            channel = wire.AsyncChannel(heard.put_nowait, lambda: None)
            await channel.attach(wire.connect(bench.core_address, timeout_s=5))
            channel.send(encode(hello))
            answer = remote.from_engine(await asyncio.wait_for(heard.get(), 30))
            assert answer == remote.Refused(remote.VERSION)
            await channel.close()

    asyncio.run(run())


# Sessions

SESSIONS = EngineInfo(64, [EOS], embed_nbytes=100, has_sessions=True)


def of_session(name: str, num_tokens: int, start: int, *items: Any, **fields: Any) -> Any:
    given = request(name, num_tokens, items, max_tokens=fields.pop("max_tokens", 2))
    return msgspec.structs.replace(given, session_id="s", start=start, **fields)


def test_session_is_extended_behind_its_answers(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's tokens are the lengths of the sequence: they go on."""

    async def main() -> None:
        async with bench_of(address, info=SESSIONS) as bench:
            worker = await bench.add_worker()
            await bench.ready()
            await bench.put(b"s-dog", b"s-cat")
            dog, cat = await bench.item(b"s-dog", 2, 4), await bench.item(b"s-cat", 1, 4)
            assert await tokens_of(bench, of_session("s1", 10, 0, dog)) == [10, 11]
            assert await tokens_of(bench, of_session("s2", 6, 12, cat, has_answer=False)) == []
            assert await tokens_of(
                bench, of_session("s3", 7, 18, cat, dog_at(dog, 5, 2), mark=b"mark")
            ) == [25, 26]
            assert worker.known["s1"] == [7] * 10 + [10, 11] + [7] * 13 + [25, 26]
            begun = [begin.sequence_id for work in worker.works for begin in work.begin]
            more = [each for work in worker.works for each in work.extend]
            assert begun == ["s1"]
            assert [len(each.token_ids) for each in more] == [6, 7]
            await bench.until_nothing_is_pinned()
            kept = await bench.client.find_session("s")
            assert kept == KeptSession(27, b"mark", None)
            bench.core._loop.end_session("s", None)  # type: ignore[union-attr,arg-type]
            assert bench.core._loop._sessions["s"].ending is None, "another frontend has it"  # type: ignore[union-attr]
            bench.client.end_session("s")
            # It stays for a client that comes back.
            assert await tokens_of(bench, of_session("s4", 2, 27)) == [29, 30]
            monkeypatch.setattr(loop, "KEEP_SESSION_S", 0.0)
            bench.client.end_session("s")
            await until(lambda: not bench.core._loop._sessions)  # type: ignore[union-attr]
            assert await bench.client.find_session("s") is None
            with pytest.raises(SessionLost):
                await tokens_of(bench, of_session("s5", 2, 31))

    asyncio.run(main())


def dog_at(item: Any, offset: int, length: int) -> Any:
    placeholder = msgspec.structs.replace(item.placeholder, offset=offset, length=length)
    return msgspec.structs.replace(item, placeholder=placeholder)


def test_session_with_another_length_or_in_use_is_lost(address: str) -> None:
    async def main() -> None:
        async with bench_of(address, info=SESSIONS) as bench:
            worker = await bench.add_worker()
            await bench.ready()
            with pytest.raises(SessionLost):
                await tokens_of(bench, of_session("l0", 4, 3))
            await tokens_of(bench, of_session("l1", 4, 0))
            with pytest.raises(SessionLost):
                await tokens_of(bench, of_session("l2", 4, 5))
            worker.hold.clear()
            running = asyncio.create_task(tokens_of(bench, of_session("l3", 4, 6)))
            await until(lambda: "l3" in bench.core._loop._sequence_of)  # type: ignore[union-attr]
            with pytest.raises(SessionLost):
                await tokens_of(bench, of_session("l4", 4, 6))
            worker.hold.set()
            assert await running == [10, 11]

    asyncio.run(main())


def test_session_whose_answer_is_aborted_begins_again_as_another_sequence(address: str) -> None:
    """The step of the aborted answer still runs when the session begins again."""

    async def main() -> None:
        async with bench_of(address, info=SESSIONS) as bench:
            worker = await bench.add_worker()
            await bench.ready()
            await tokens_of(bench, of_session("a1", 4, 0))
            worker.hold.clear()
            events = bench.client.submit(of_session("a2", 4, 6, max_tokens=20))
            assert isinstance(await anext(events), Accepted)
            await until(lambda: bool(worker.works[-1].extend))
            await events.aclose()
            again = asyncio.create_task(tokens_of(bench, of_session("a3", 9, 0)))
            await until(lambda: "a3" in bench.core._loop._requests)  # type: ignore[union-attr]
            worker.hold.set()
            assert await again == [9, 10]
            await until(lambda: list(worker.known) == ["a3"])

    asyncio.run(main())


def test_idle_session_makes_room_for_requests_that_wait(address: str) -> None:
    async def main() -> None:
        budget = KvBudget(num_tokens=64)
        async with bench_of(address, info=SESSIONS, kv_budget=budget) as bench:
            await bench.add_worker()
            await bench.ready()
            await tokens_of(bench, of_session("i1", 4, 0))
            assert await tokens_of(bench, request("plain", 40, max_tokens=2)) == [40, 41]
            with pytest.raises(SessionLost):
                await tokens_of(bench, of_session("i2", 4, 6))
            assert await tokens_of(bench, of_session("i3", 10, 0)) == [10, 11]

    asyncio.run(main())


def test_sessions_stay_for_another_frontend_and_end_with_the_workers(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with bench_of(address, info=SESSIONS) as bench:
            worker = await bench.add_worker()
            await bench.ready()
            await tokens_of(bench, of_session("e1", 4, 0))
            assert bench.client._channel is not None
            bench.client._channel.abort()
            await until(lambda: bench.client.info is None)
            await bench.ready()
            assert await bench.client.find_session("s") == KeptSession(6, b"", None)
            await tokens_of(bench, of_session("e1-more", 4, 6))
            monkeypatch.setattr(loop, "KEEP_SESSION_S", 0.0)
            bench.client._channel.abort()
            await until(lambda: not bench.core._loop._sessions)  # type: ignore[union-attr]
            await bench.ready()
            await tokens_of(bench, of_session("e2", 4, 0))
            await worker.leave()
            await until(lambda: bench.client.info is None)
            with contextlib.suppress(EngineUnavailable):
                await tokens_of(bench, of_session("e3", 4, 6))
            await bench.add_worker()
            await bench.ready()
            with pytest.raises(SessionLost):
                await tokens_of(bench, of_session("e4", 4, 6))

    asyncio.run(main())


def test_step_that_begins_long_prompts_is_one_message_of_any_length(address: str) -> None:
    """Together, the prompts are longer than any other message may be."""

    async def run() -> None:
        num_tokens = 600_000
        info = EngineInfo(1 << 20, [EOS], embed_nbytes=ROW_NBYTES)
        async with bench_of(address, info=info, max_num_batched_tokens=1 << 22) as bench:
            worker = await bench.add_worker()
            await bench.ready()
            worker.hold.clear()
            first = asyncio.create_task(tokens_of(bench, request("a", 10)))
            await until(lambda: len(worker.works) == 1)
            asked = [
                EngineRequest(name, [100_000] * num_tokens, [], Sampling(max_tokens=1))
                for name in ("b", "c")
            ]
            answers = [asyncio.create_task(tokens_of(bench, each)) for each in asked]
            await until(lambda: len(bench.core._loop._requests) == 3)
            worker.hold.set()
            assert await asyncio.gather(*answers) == [[num_tokens]] * 2
            await first
            assert max(len(encode(work)) for work in worker.works) > wire.MAX_FRAME_NBYTES

    asyncio.run(run())


@pytest.mark.parametrize("ends", ["pinned", "failed"])
def test_request_that_comes_again_is_not_touched_by_its_first_attempt(
    address: str, ends: str
) -> None:
    """The first one was aborted while its items were being pinned."""

    async def run() -> None:
        async with bench_of(address) as bench:
            worker = await bench.add_worker()
            await bench.ready()
            await bench.put(b"a-dog")
            wanted = request("a", 10, [await bench.item(b"a-dog", 2, 4)])
            worker.hold.clear()  # so the second attempt is accepted, and not in a step yet
            busy = asyncio.create_task(tokens_of(bench, request("b", 10)))
            await until(lambda: len(worker.works) == 1)
            store: Any = bench.core._loop._pins._store
            get, may_end = store.get, [asyncio.Event(), asyncio.Event()]
            first, again = may_end
            again.set()

            async def late(name: str, *given: Any, **named: Any) -> Any:
                mine = may_end.pop(0) if may_end else again  # later, the steps pin
                await mine.wait()
                if mine is first and ends == "failed":
                    raise StaleHandle("it is gone")
                return await get(name, *given, **named)

            store.get = late
            channel: Any = bench.client._channel
            channel.send(encode(remote.Submit(wanted)))
            await until(lambda: len(may_end) == 1)
            channel.send(encode(remote.Abort("a")))
            events = bench.client.submit(wanted)
            assert isinstance(await anext(events), Accepted)
            first.set()
            await until(lambda: len(bench.core._loop._tasks) == 0)
            assert await bench.num_pinned() == 1
            worker.hold.set()
            kinds = [type(event) async for event in events]
            assert kinds.count(Tokens) == 3
            await busy
            await bench.until_nothing_is_pinned()

    asyncio.run(run())
