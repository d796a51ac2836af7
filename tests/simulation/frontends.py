"""Frontends with an event loop; their requests use the product's gate and `Maker`."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from afferent.admission.gate import Gate
from afferent.admission.shares import Share
from afferent.engines.protocol import Accepted, EngineRequest, Tokens
from afferent.engines.remote.client import RemoteEngine
from afferent.errors import AfferentError, DeadlineExceeded, StoreFull, StoreUnavailable
from afferent.items.acquire import Maker, handle_of
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import Join, Queue, SealItem
from afferent.store.protocol.results import Failed, Hit, InFlight, Made
from afferent.telemetry.trace import Trace
from afferent.types import (
    ContentKey,
    CreateItem,
    Handle,
    Item,
    Modality,
    ObjectKind,
    Placeholder,
    ReserveItem,
    Sampling,
)
from tests.simulation import vllm
from tests.simulation.engine import answer_to
from tests.simulation.oracle import LINE_NBYTES, Use, key_of
from tests.simulation.plan import NOTHING, Task
from tests.simulation.sizes import RAW, TENANTS, Limit, lines_of
from tests.simulation.world import ADDRESS, CORE, SHARES, World
from tests.simulator.loop import Loop
from tests.simulator.machine import Process

T = TypeVar("T")


class Frontend:
    """A frontend with an `AsyncDaemonStore`, a `Gate` and a `Maker`."""

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process, self._plan = world, process, world.plan
        self._loop = Loop(process)
        self._loop.call_soon(lambda: self._loop.create_task(self._run()))

    async def _run(self) -> None:
        world, plan, name = self._world, self._plan, self._process.name
        try:
            self._store = await AsyncDaemonStore.connect(ADDRESS, name=name, writable=True)
        except StoreUnavailable:
            world.machine.kill(self._process)  # the supervisor starts another
            return
        self._gate = Gate(
            self._store,
            timeout_s=plan.timeout_s,
            max_concurrency=plan.permits,
            clock=lambda: self._process.monotonic_s,
        )
        self._maker = Maker(self._store, self._gate, shares=SHARES, timeout_s=plan.timeout_s)
        self._engine = RemoteEngine(CORE, name=name)
        if plan.ranks:
            self._loop.create_task(self._engine.run())
        for task in world.tasks_of(name):
            delay_s = max(task.at_s - world.machine.now_s, 0.0)
            world.machine.after(delay_s, self._begin, task, process=self._process)

    def _begin(self, task: Task) -> None:
        self._world.begin(task, self._process)
        if task.what == NOTHING:
            self._world.end(task, NOTHING)
            return
        self._loop.call_soon(lambda: self._loop.create_task(self._do(task)))

    async def _do(self, task: Task) -> None:
        rng = random.Random(task.seed)
        request = f"{self._process.name}/{task.number}"
        whose = rng.randrange(2)
        self._store.introduce(request, Share(TENANTS[whose], self._plan.weights[whose]))
        kinds: dict[str, Callable[[str, random.Random], Awaitable[None]]] = {
            "media": self._media,
            "names": self._names,
            "permit": self._permit,
            "room": self._room,
            "released": self._released,
        }
        doing = asyncio.ensure_future(kinds[task.what](request, rng))
        if rng.random() < 0.25:  # the client disconnects
            self._loop.call_later(rng.random() * self._plan.timeout_s, doing.cancel)
        try:
            await doing
            outcome = "answered"
        except AfferentError as error:
            outcome = error.code
        except asyncio.CancelledError:
            outcome = "cancelled"
        self._store.forget(request)
        self._world.end(task, outcome)

    async def _timed(self, what: str, limit_s: float, call: Awaitable[T]) -> T:
        limit = Limit(self._world, self._process, what, limit_s)
        try:
            return await call
        finally:
            limit.check()

    async def _media(self, request: str, rng: random.Random) -> None:
        """Store raw media, request their features, and read these."""
        plan, count = self._plan, rng.choice((1, 1, 2))
        keys = [rng.randrange(plan.num_keys) for _ in range(count)]
        keys = list(dict.fromkeys(keys))
        raw = [CreateItem(ObjectKind.RAW, LINE_NBYTES * lines_of(plan, key)) for key in keys]
        limit_s = plan.timeout_s + 20.0
        handles = await self._timed("raw", limit_s, self._gate.create(request, raw))
        for key, handle in zip(keys, handles, strict=True):
            await self._write(handle, key + RAW)
        items = [SealItem(handle, handle.nbytes) for handle in handles]
        sealed = await self._timed("seal", 10.0, self._store.seal(request, items))
        room = [
            ReserveItem(ObjectKind.FEATURES, LINE_NBYTES * (lines_of(plan, key) + 1))
            for key in keys
        ]
        wanted = [
            Queue(key_of(key), ObjectKind.FEATURES, each.nbytes, [handle], b"", rng.choice(_COSTS))
            for key, each, handle in zip(keys, room, sealed, strict=True)
        ]
        trace = Trace(request, "simulated")
        number = self._store.client_number
        outcomes = await self._timed(
            "acquire",
            2 * plan.timeout_s + 20.0,
            self._maker.acquire(request, wanted, trace, room=room, in_turn=True),
        )
        for outcome in outcomes:
            broken = isinstance(outcome, Failed) and outcome.failure.code == StoreFull.code
            if broken and number == self._store.client_number and self._store.is_open:
                self._world.machine.violate(
                    f"promise: {request} has room, and is told there is none"
                )
        content = [ContentKey(key_of(key)) for key in keys]
        outcomes = await self._timed(
            "wait", plan.timeout_s, self._maker.settle(request, content, outcomes, trace)
        )
        handles = [handle_of(outcome) for outcome in outcomes]
        for key, handle in zip(keys, handles, strict=True):
            await self._read(handle, key)
        if plan.ranks:
            await self._ask(request, keys, handles)
        if plan.has_vllm:
            await self._ask_vllm(request, keys, handles)

    async def _ask_vllm(self, request: str, keys: list[int], handles: list[Handle]) -> None:
        """Request an answer of vLLM, which may end with a failure; the pins last until then."""
        loop = asyncio.get_running_loop()
        end: asyncio.Future[bool] = loop.create_future()

        def on_end(is_answered: bool) -> None:
            if not end.done():
                end.set_result(is_answered)

        if self._world.machine.rng.random() < 0.8:
            self._store.release_early(request, handles)
        asked = vllm.ask(self._world, request, [key_of(key) for key in keys], handles)
        asked.on_end = lambda is_answered: self._tell(on_end, is_answered)
        try:
            async with asyncio.timeout(self._plan.timeout_s + 10.0):
                await end
            await self._timed("check", 10.0, self._store.check_pins(request, handles))
        except TimeoutError:
            raise DeadlineExceeded("vLLM does not answer") from None
        finally:
            self._world.vllm.abort(asked)

    def _tell(self, on_end: Callable[[bool], None], is_answered: bool) -> None:
        """Call this process's loop from another process."""
        self._world.machine.after(1e-4, self._soon, on_end, is_answered, process=self._process)

    def _soon(self, on_end: Callable[[bool], None], is_answered: bool) -> None:
        self._loop.call_soon(on_end, is_answered)

    async def _ask(self, request: str, keys: list[int], handles: list[Handle]) -> None:
        """Request an answer of the engine; once it has accepted, release the request."""
        items = [
            Item(Modality.IMAGE, key_of(key), handle, Placeholder(2 + 5 * i, 4))
            for i, (key, handle) in enumerate(zip(keys, handles, strict=True))
        ]
        sampling = Sampling(max_tokens=3, seed=1)
        asked = EngineRequest(request, [7] * (4 + 5 * len(keys)), items, sampling)
        tokens: list[int] = []
        async with contextlib.aclosing(self._engine.submit(asked)) as events:
            async for event in events:
                if isinstance(event, Accepted):
                    self._store.forget(request)
                elif isinstance(event, Tokens):
                    tokens += event.token_ids
        if tokens != [answer_to(keys)] * 3:
            self._world.machine.violate(f"answer: {request} about {keys} is {tokens}")

    async def _names(self, request: str, rng: random.Random) -> None:
        """Read an object by its key; if it is being made, wait for it."""
        key = rng.randrange(self._plan.num_keys)
        (outcome,) = await self._timed(
            "join", 10.0, self._store.acquire(request, [Join(key_of(key))])
        )
        if isinstance(outcome, InFlight):
            wait = self._store.wait(request, [key_of(key)], timeout_s=self._plan.timeout_s)
            (outcome,) = await self._timed("wait", self._plan.timeout_s, wait)
        if isinstance(outcome, Hit | Made):
            await self._read(handle_of(outcome), key)

    async def _permit(self, request: str, rng: random.Random) -> None:
        await self._timed("enter", self._plan.timeout_s, self._gate.enter(request))
        await asyncio.sleep(rng.random() * 0.3)
        if rng.random() < 0.5:
            self._store.release_permit(request, "preprocess")

    async def _released(self, request: str, rng: random.Random) -> None:
        """A waiting call fails at once when its request is released."""
        key = rng.randrange(self._plan.num_keys)
        (outcome,) = await self._store.acquire(request, [Join(key_of(key))])
        if isinstance(outcome, InFlight):
            self._loop.call_later(2e-4, self._store.forget, request)
            limit_s = 60.0 if self._plan.faults else 0.3
            await self._timed(
                "release", limit_s, self._store.wait(request, [key_of(key)], timeout_s=60.0)
            )

    async def _room(self, request: str, rng: random.Random) -> None:
        """Reserve space for several blocks, and create them one by one."""
        nbytes = LINE_NBYTES * rng.choice((4, 4, 16))
        count = rng.randint(1, 3)
        room = [ReserveItem(ObjectKind.RECORDS, nbytes)] * count
        number = self._store.client_number
        await self._timed("admit", self._plan.timeout_s, self._gate.admit(request, room))
        await asyncio.sleep(rng.random() * 0.2)
        for _ in range(count):
            create = self._store.create(
                request, [CreateItem(ObjectKind.RECORDS, nbytes)], timeout_s=self._plan.timeout_s
            )
            try:
                (handle,) = await self._timed("create", self._plan.timeout_s, create)
            except StoreFull:
                if number == self._store.client_number and self._store.is_open:
                    self._world.machine.violate(f"promise: {request} finds its room taken")
                raise
            await self._write(handle, 2000)
            if rng.random() < 0.3:
                self._store.discard(request, [handle])
            else:
                await self._store.seal(request, [SealItem(handle, nbytes)])

    async def _write(self, handle: Handle, what: int) -> None:
        use = self._use(handle, what, writes=True)
        try:
            half = handle.nbytes // LINE_NBYTES // 2
            use.write(0, half)
            if half % 2:
                await asyncio.sleep(1e-4)
            use.check(0, half)
            use.write(half, handle.nbytes // LINE_NBYTES)
        finally:
            use.close()

    async def _read(self, handle: Handle, what: int) -> None:
        use = self._use(handle, what, writes=False)
        try:
            use.check(0, handle.nbytes // LINE_NBYTES)
            await asyncio.sleep(self._world.looking_s())
            use.check(0, handle.nbytes // LINE_NBYTES)
            self._world.seen_handles.append((handle, what))
        finally:
            use.close()

    def _use(self, handle: Handle, what: int, *, writes: bool) -> Use:
        block = self._store.block(handle)
        return self._world.oracle.begin(self._process, block, handle, what, writes=writes)


_COSTS = (1000, 300_000)
