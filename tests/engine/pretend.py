"""A core in this process with a real store, and workers that only pretend to compute."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from afferent.builtin.engine import messages as m
from afferent.builtin.engine.core.main import EngineCore
from afferent.builtin.engine.kv_budget import KvBudget
from afferent.builtin.engine.launch import CoreSettings
from afferent.engines.protocol import Accepted, Chosen, EngineInfo, EngineRequest, Finished, Tokens
from afferent.engines.remote.client import RemoteEngine
from afferent.errors import ConnectionClosed
from afferent.runtime import wire
from afferent.runtime.sockets import new_address
from afferent.store.block import codec
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import Find, SealItem
from afferent.store.protocol.results import ObjectInfo
from afferent.types import (
    CreateItem,
    Failure,
    Item,
    Modality,
    ObjectKind,
    Placeholder,
    Sampling,
    decode,
    encode,
)
from tests.waiting import until

EOS = 2
ROW_NBYTES = 100
_SETTINGS: dict[str, Any] = {
    "num_workers": 1,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_num_batched_embeds": 64,
    "encoder_cache_nbytes": 1 << 20,
    "prefix_cache_tokens": 0,
    "kv_budget": KvBudget(),
    "step_timeout_s": 30.0,
    "position_features": frozenset({"image_grid_thw"}),
}


class PretendWorker:
    """A worker whose next token is the length of the sequence; it checks its orders.

    While `hold` is cleared it answers nothing. It clears `hold` at the first step for which
    `pauses_at` returns true.
    """

    def __init__(self, rank: int, store: AsyncDaemonStore, info: EngineInfo) -> None:
        self.rank, self.store, self.info = rank, store, info
        self.weights = b""
        self.works: list[m.Work] = []
        self.bad: set[bytes] = set()
        self.cannot_begin: set[str] = set()
        self.is_cut = asyncio.Event()
        self.hold = asyncio.Event()
        self.hold.set()
        self.pauses_at: Callable[[m.Work], bool] | None = None
        self.known: dict[str, list[int]] = {}
        self.embeddings: set[bytes] = set()
        self._frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.channel = wire.AsyncChannel(
            self._frames.put_nowait, self.is_cut.set, max_nbytes=m.MAX_WORK_NBYTES
        )
        self._task: asyncio.Task[None] | None = None

    async def come(self, address: str) -> None:
        await self.channel.attach(await asyncio.to_thread(wire.connect, address, timeout_s=30.0))
        self.channel.send(encode(m.WorkerHello(self.rank, 1234)))
        self._task = asyncio.create_task(self._run())

    async def leave(self) -> None:
        self.channel.abort()
        await self.is_cut.wait()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        rendezvous = decode(m.to_worker_decoder, await self._frames.get())
        assert rendezvous == m.Rendezvous(1234)
        ready = m.WorkerReady(self.store.client_number, self.info, self.weights)
        self.channel.send(encode(ready))
        while True:
            work = decode(m.to_worker_decoder, await self._frames.get())
            assert isinstance(work, m.Work)
            self.works.append(work)
            if self.pauses_at is not None and self.pauses_at(work):
                self.hold.clear()
            await self.hold.wait()
            done = await self._do(work)
            with contextlib.suppress(ConnectionClosed):
                self.channel.send(encode(done))

    async def _do(self, work: m.Work) -> m.WorkDone:
        for sequence_id in work.drop:
            self.known.pop(sequence_id, None)
        self.embeddings -= set(work.evict)
        failures = [
            (item.key, Failure("internal_error", "bad"))
            for item in work.encode
            if item.key in self.bad
        ]
        if work.lease:
            if work.encode and self.store.client_number not in work.pinned_for:
                await self.store.get(work.lease, [item.handle for item in work.encode])
            for item in work.encode:
                codec.view(self.store.block(item.handle))
                assert item.key not in self.embeddings
            self.embeddings |= {item.key for item in work.encode} - self.bad
            self.store.forget(work.lease)
        for begin in work.begin:
            if begin.sequence_id not in self.cannot_begin:
                self.known[begin.sequence_id] = list(begin.token_ids)
        for more in work.extend:
            self.known[more.sequence_id] += more.token_ids
        unbegun = [
            (begin.sequence_id, Failure("internal_error", "bad"))
            for begin in work.begin
            if begin.sequence_id in self.cannot_begin
        ]
        chosen = []
        for sequence_id in [c.sequence_id for c in work.prefill if c.samples] + work.decode:
            if sequence_id in self.cannot_begin:
                continue
            tokens = self.known[sequence_id]
            tokens.append(len(tokens))
            chosen.append(Chosen(sequence_id, tokens[-1]))
        num_encoded = len(work.encode) - len(failures)
        client = self.store.client_number
        return m.WorkDone(work.number, client, chosen, failures, unbegun, [], num_encoded)


@dataclass
class Bench:
    """A core, its workers and a frontend, with their connections to the store."""

    address: str
    core: EngineCore
    core_address: str
    store: AsyncDaemonStore
    client: RemoteEngine
    info: EngineInfo
    workers: list[PretendWorker] = field(default_factory=list)

    async def add_worker(self, rank: int = 0, *, weights: bytes = b"") -> PretendWorker:
        store = await AsyncDaemonStore.connect(self.address, name=f"worker-{rank}")
        worker = PretendWorker(rank, store, self.info)
        worker.weights = weights
        self.workers.append(worker)
        await worker.come(self.core_address)
        return worker

    async def ready(self) -> None:
        await until(lambda: self.client.info is not None)

    async def put(self, *keys: bytes) -> None:
        """Store features under these keys, without pins."""
        tree: Any = {"image_grid_thw": np.array([[1, 2, 2]]), "prompt": ["x"]}
        nbytes = codec.plan(tree).nbytes
        items = [CreateItem(ObjectKind.FEATURES, nbytes, key_of(key)) for key in keys]
        handles = await self.store.create("put", items)
        for handle in handles:
            codec.write_into(tree, self.store.block(handle))
        await self.store.seal("put", [SealItem(h, nbytes) for h in handles])
        await self.store.release("put")

    async def item(self, key: bytes, offset: int, length: int) -> Item:
        (outcome,) = await self.store.acquire("find", [Find(key_of(key))])
        assert outcome.handle is not None
        await self.store.release("find")
        placeholder = Placeholder(offset, length)
        return Item(Modality.IMAGE, key_of(key), outcome.handle, placeholder)

    async def pinned(self) -> list[ObjectInfo]:
        return [each for each in await self.store.list_objects() if each.pins]

    async def num_pinned(self) -> int:
        return len(await self.pinned())

    async def until_nothing_is_pinned(self) -> None:
        async with asyncio.timeout(60):
            while await self.num_pinned():
                await asyncio.sleep(0.005)


def key_of(name: bytes) -> bytes:
    return name.ljust(32, b"-")


def request(
    name: str, num_tokens: int, items: Iterable[Item] = (), **sampling: Any
) -> EngineRequest:
    given = Sampling(**{"max_tokens": 3, **sampling})
    return EngineRequest(name, [7] * num_tokens, list(items), given)


async def tokens_of(bench: Bench, wanted: EngineRequest) -> list[int]:
    """Return the tokens of the answer: each is the length of the sequence at its step."""
    tokens: list[int] = []
    kinds = []
    async for event in bench.client.submit(wanted):
        kinds.append(type(event))
        if isinstance(event, Tokens):
            tokens += event.token_ids
    assert kinds[0] is Accepted
    assert kinds[-1] is Finished
    assert kinds.count(Accepted) == 1
    return tokens


@contextlib.asynccontextmanager
async def bench_of(
    address: str, *, info: EngineInfo | None = None, **settings: Any
) -> AsyncIterator[Bench]:
    """Run a core with these ``settings``, and a frontend, both with the store at ``address``."""
    core_address = new_address("core")
    listener = wire.listen(core_address)
    stores = [await AsyncDaemonStore.connect(address, name=name, writable=True)
              for name in ("core", "frontend")]  # fmt: skip
    given = {**_SETTINGS, **settings}
    core = EngineCore(stores[0], CoreSettings(store_address=address, listener_fd=0, **given))
    client = RemoteEngine(core_address, name="frontend")
    tasks = [asyncio.create_task(core.serve(listener)), asyncio.create_task(client.run())]
    info = info or EngineInfo(4096, [EOS], embed_nbytes=ROW_NBYTES)
    bench = Bench(address, core, core_address, stores[1], client, info)
    try:
        yield bench
    finally:
        for worker in bench.workers:
            await worker.leave()
            stores.append(worker.store)
        tasks[1].cancel()
        if client._channel is not None:
            client._channel.abort()
        await until(lambda: not core._frontends)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for kind in (ObjectKind.FEATURES, ObjectKind.EMBEDDINGS):
            await stores[1].evict(kind)
        for store in stores:
            await store.close()
        listener.close()
