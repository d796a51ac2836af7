"""The built-in engine: its real core, and simulated workers that do not compute."""

from __future__ import annotations

import random
from typing import Any

from afferent.builtin.engine import messages as m
from afferent.builtin.engine.core.main import EngineCore
from afferent.builtin.engine.kv_budget import KvBudget
from afferent.builtin.engine.launch import CoreSettings
from afferent.engines.protocol import Chosen, EngineInfo
from afferent.errors import AfferentError, StoreUnavailable
from afferent.runtime import wire
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.types import Failure, Handle, decode, encode
from tests.simulation.oracle import LINE_NBYTES, Observed, number_of
from tests.simulation.sizes import sleep
from tests.simulation.workers import Blocking
from tests.simulation.world import ADDRESS, CORE, World
from tests.simulator import threads
from tests.simulator.loop import Loop
from tests.simulator.machine import Process
from tests.simulator.socket_calls import Socket

_INFO = EngineInfo(max_model_len=256, eos_token_ids=[2], embed_nbytes=100)
_BAD = Failure("internal_error", "this item can't be encoded")


def answer_to(keys: list[int]) -> int:
    """Return the token that an answer about these items repeats."""
    return 1000 + sum(key + 1 for key in keys)


def grids_of_stamps(pins: Any, handle: Handle) -> dict[str, m.Grid]:
    """Replace `Pins._grids`: a simulated block holds stamps instead of tensors."""
    process = threads.current().process
    block = pins._store.block(handle)
    what = int.from_bytes(block[:8], "little")
    use = Observed.oracle.begin(process, block, handle, what, writes=False)
    use.check(0, handle.nbytes // LINE_NBYTES)
    use.close()
    return {}


class Core:
    """The engine core, a process between the frontends and the workers."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
        world.core = None  # the core of the former process
        loop = Loop(process)
        loop.call_soon(lambda: loop.create_task(self._run()))

    async def _run(self) -> None:
        machine, ranks = self._world.machine, self._world.plan.ranks
        try:
            store = await AsyncDaemonStore.connect(ADDRESS, name="core")
        except StoreUnavailable:
            machine.kill(self._process)
            return
        settings = CoreSettings(
            store_address=ADDRESS,
            listener_fd=0,
            num_workers=len(ranks),
            max_num_seqs=2,
            max_num_batched_tokens=8,
            max_num_batched_embeds=16,
            encoder_cache_nbytes=1200,
            prefix_cache_tokens=24,
            kv_budget=KvBudget(num_tokens=64),
            step_timeout_s=1.0,
        )
        core = EngineCore(store, settings)
        self._world.core = core
        listener: Any = Socket.over(self._process, self._world.core_listener)
        await core.serve(listener)


class Rank(Blocking):
    """An engine worker; the tokens it chooses show which features it has read."""

    def _work(self) -> None:
        self._rng = random.Random(f"{self._plan.seed} {self._process.start_ticks}")
        self._embeddings: dict[bytes, int] = {}
        self._begun: dict[str, m.Begin] = {}
        self._seen: dict[str, dict[int, int]] = {}  # what was read, by sequence and offset
        try:
            self._follow(wire.SyncChannel(wire.connect(CORE, timeout_s=30.0)))
        except AfferentError:
            self._world.machine.kill(self._process)

    def _follow(self, core: wire.SyncChannel) -> None:
        """Carry out the core's steps until the connection ends."""
        rank = self._plan.ranks.index(self._process.name)
        core.send(encode(m.WorkerHello(rank, 1234)), timeout_s=30.0)
        core.receive(timeout_s=None)
        ready = m.WorkerReady(self._store.client_number, _INFO, b"")
        core.send(encode(ready), timeout_s=30.0)
        while True:
            work = decode(m.to_worker_decoder, core.receive(timeout_s=None))
            if isinstance(work, m.Work):
                core.send(encode(self._do(work)), timeout_s=None)

    def _do(self, work: m.Work) -> m.WorkDone:
        done = m.WorkDone(work.number, self._store.client_number, [], [], [], [], 0)
        for name in work.drop:
            self._begun.pop(name, None)
        for key in work.evict:
            self._embeddings.pop(key, None)
        if work.lease:
            try:
                self._encode(work, done)
            finally:
                self._store.forget(work.lease)
        for begin in work.begin:
            self._begin(begin)
        self._compute(work, done)
        return done

    def _begin(self, begin: m.Begin) -> None:
        self._seen[begin.sequence_id] = {}
        if (reuse := begin.reuse) is not None:
            source = self._begun[reuse.source_id]
            number = reuse.num_tokens
            if _content(source, number) != _content(begin, number):
                self._world.machine.violate("engine: a prompt begins with another one's content")
            seen = self._seen[reuse.source_id]
            self._seen[begin.sequence_id] = {at: seen[at] for at in seen if at < number}
            if reuse.is_move:
                del self._begun[reuse.source_id]
        self._begun[begin.sequence_id] = begin

    def _encode(self, work: m.Work, done: m.WorkDone) -> None:
        """Read the items of a step, as `ItemEncoder` does."""
        if work.encode and self._store.client_number not in work.pinned_for:
            try:
                self._store.get(work.lease, [item.handle for item in work.encode])
            except AfferentError as error:
                failure = Failure(error.code, error.message)
                done.failed_items += [(item.key, failure) for item in work.encode]
                return
        for item in work.encode:
            if self._rng.random() < 0.05:
                done.failed_items.append((item.key, _BAD))
                continue
            try:
                use = self._use(item.handle, number_of(item.key), writes=False)
            except AfferentError as error:
                done.failed_items.append((item.key, Failure(error.code, error.message)))
                continue
            use.check(0, item.handle.nbytes // LINE_NBYTES)
            sleep(self._world.looking_s())
            use.check(0, item.handle.nbytes // LINE_NBYTES)
            self._embeddings[item.key] = use.what + 1
            use.close()

    def _compute(self, work: m.Work, done: m.WorkDone) -> None:
        for chunk in work.prefill:
            for item in self._begun[chunk.sequence_id].items:
                if chunk.start <= item.placeholder.offset < chunk.start + chunk.num_tokens:
                    if item.key not in self._embeddings:
                        self._world.machine.violate(f"engine: {item.key[:1]!r} is not encoded")
                    seen = self._embeddings.get(item.key, 0)
                    self._seen[chunk.sequence_id][item.placeholder.offset] = seen
        sampled = [chunk.sequence_id for chunk in work.prefill if chunk.samples]
        for name in [*sampled, *work.decode]:
            done.chosen.append(Chosen(name, 1000 + sum(self._seen[name].values())))


def _content(begun: m.Begin, num_tokens: int) -> object:
    """Return the first tokens of a prompt, and the items that begin among them."""
    items = [
        (item.key, item.placeholder) for item in begun.items if item.placeholder.offset < num_tokens
    ]
    return begun.token_ids[:num_tokens], items
