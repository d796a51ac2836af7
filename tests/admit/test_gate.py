"""The gate alone: waits, what is told to those who wait in vain, and that nothing stays behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from afferent.admit.gate import Gate
from afferent.errors import ArenaTooSmall, DeadlineExceeded, SlotTaken, StoreFull
from afferent.store import messages as m
from afferent.store.async_client import AsyncDaemonStore
from afferent.store.server import StoreServer
from afferent.types import Handle, MiB, ObjectKind

FEATURES = ObjectKind.FEATURES
CAPACITY = 4 * MiB


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer(CAPACITY, shares={FEATURES: 1.0}) as made:
        yield made


class FakeLedger:
    """Grants after as many seconds as it is told, on a clock that it moves itself."""

    def __init__(self) -> None:
        self.now_s, self.wait_s = 100.0, 0.0
        self.refusal: type[Exception] | None = None
        self.forgotten: list[str] = []

    async def reserve(
        self, request: str, items: Sequence[m.ReserveItem], *, timeout_s: float
    ) -> None:
        await asyncio.sleep(0)
        self.now_s += self.wait_s
        if self.refusal is not None:
            raise self.refusal("no")

    async def create(self, request: str, items: Sequence[m.CreateItem]) -> list[Handle]:
        raise AssertionError

    async def enter(self, request: str, slot: str, *, limit: int, timeout_s: float) -> None:
        assert slot == "preprocess"
        await self.reserve(request, [], timeout_s=timeout_s)

    def forget(self, request: str) -> None:
        self.forgotten.append(request)


def test_a_refusal_says_when_to_try_again() -> None:
    ledger = FakeLedger()
    waits: list[float] = []
    gate = Gate(ledger, timeout_s=5.0, on_wait=waits.append, clock=lambda: ledger.now_s)

    async def main() -> None:
        assert gate.retry_after_s == 1.0
        ledger.wait_s = 4.0
        for _ in range(10):  # one every four seconds
            await gate.admit("r", [m.ReserveItem(FEATURES, 10)])
        ledger.refusal = DeadlineExceeded
        with pytest.raises(DeadlineExceeded) as refused:
            await gate.admit("r", [m.ReserveItem(FEATURES, 10)])
        assert 4.0 <= refused.value.retry_after_s <= 10.0
        ledger.refusal, ledger.wait_s = StoreFull, 0.0
        many = [gate.admit(f"{n}", [m.ReserveItem(FEATURES, 10)]) for n in range(8)]
        errors = await asyncio.gather(*many, return_exceptions=True)
        longest = max(error.retry_after_s for error in errors)  # type: ignore[union-attr]
        assert 20.0 <= longest <= 60.0

    asyncio.run(main())
    assert gate.num_waiting == 0
    assert len(waits) == 19
    assert waits[:10] == [4.0] * 10


@pytest.mark.parametrize("error", [None, ValueError("inside"), asyncio.CancelledError()])
def test_what_was_reserved_goes_with_the_block(error: BaseException | None) -> None:
    ledger = FakeLedger()

    async def main() -> None:
        async with Gate(ledger, timeout_s=1.0).reserve("r", {FEATURES: 100}):
            assert ledger.forgotten == []
            if error is not None:
                raise error

    if error is None:
        asyncio.run(main())
    else:
        with pytest.raises(type(error)):
            asyncio.run(main())
    assert ledger.forgotten == ["r"]


def test_a_block_that_is_not_entered_holds_nothing() -> None:
    ledger = FakeLedger()
    ledger.refusal = StoreFull

    async def main() -> None:
        with pytest.raises(StoreFull):
            async with Gate(ledger, timeout_s=1.0).reserve("r", {FEATURES: 100}):
                raise AssertionError

    asyncio.run(main())
    assert ledger.forgotten == []


def test_the_budget_is_hard_and_in_order(server: StoreServer) -> None:
    """Ten requests of a third of the arena each: three at a time at most, first come first."""

    async def main() -> tuple[list[int], int]:
        store = await AsyncDaemonStore.connect(server.address, name="gate", writable=True)
        gate = Gate(store, timeout_s=30.0)
        order: list[int] = []
        inside = most = 0
        is_full = asyncio.Event()

        async def one(number: int) -> None:
            nonlocal inside, most
            async with gate.reserve(f"r{number}", {FEATURES: CAPACITY * 3 // 10}):
                order.append(number)
                inside += 1
                most = max(most, inside)
                if inside == 3:
                    is_full.set()
                await is_full.wait()
                await asyncio.sleep(0.01)
                inside -= 1

        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(one(number))
                await asyncio.sleep(0)
        figures = await store.stat()
        assert (figures.granted_nbytes, figures.num_reservations_queued) == (0, 0)
        await store.close()
        return order, most

    order, most = asyncio.run(main())
    assert order == list(range(10))
    assert most == 3


@pytest.mark.parametrize("wants", ["room", "blocks"])
@pytest.mark.parametrize("how", ["timeout", "cancelled", "never fits", "other process dies"])
def test_who_is_not_let_in_leaves_nothing(server: StoreServer, how: str, wants: str) -> None:
    async def main() -> None:
        holder = await AsyncDaemonStore.connect(server.address, name="holder")
        store = await AsyncDaemonStore.connect(server.address, name="gate", writable=True)
        await holder.reserve("held", [m.ReserveItem(FEATURES, CAPACITY * 3 // 4)])
        gate = Gate(store, timeout_s=0.05 if how == "timeout" else 30.0)
        nbytes = 2 * CAPACITY if how == "never fits" else CAPACITY // 2

        async def ask() -> None:
            if wants == "room":
                await gate.admit("r", [m.ReserveItem(FEATURES, nbytes)])
            else:
                await gate.create("r", [m.CreateItem(FEATURES, nbytes)])

        waiting = asyncio.create_task(ask())
        if how == "timeout":
            with pytest.raises(DeadlineExceeded):
                await waiting
        elif how == "never fits":
            with pytest.raises(ArenaTooSmall):
                await waiting
        else:
            while (await holder.stat()).num_reservations_queued == 0:
                await asyncio.sleep(0.001)
            if how == "cancelled":
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            else:  # what it held is free, and who waited is let in
                await holder.close()
                await waiting
                store.forget("r")
        await holder.close()
        while (await store.stat()).granted_nbytes:
            await asyncio.sleep(0.001)
        assert (await store.stat()).num_reservations_queued == 0
        await store.close()

    asyncio.run(main())


def test_blocks_are_given_at_once_where_nobody_waits(server: StoreServer) -> None:
    """A small one does not go past a large one that came first, though there is room for it."""

    async def main() -> list[str]:
        store = await AsyncDaemonStore.connect(server.address, name="gate", writable=True)
        gate = Gate(store, timeout_s=30.0)
        order: list[str] = []

        async def one(name: str, nbytes: int) -> None:
            (handle,) = await gate.create(name, [m.CreateItem(FEATURES, nbytes)])
            assert handle.nbytes == nbytes
            order.append(name)

        await one("first", CAPACITY // 2)
        assert (await store.stat()).granted_nbytes == 0
        waiting = []
        for number, (name, nbytes) in enumerate([("large", CAPACITY * 3 // 4), ("small", 1000)]):
            waiting.append(asyncio.create_task(one(name, nbytes)))
            while (await store.stat()).num_reservations_queued <= number:
                await asyncio.sleep(0.001)
        assert gate.num_waiting == 2
        store.forget("first")
        await asyncio.gather(*waiting)
        assert (await store.stat()).granted_nbytes == 0
        for name in order:
            store.forget(name)
        assert (await store.stat()).held_nbytes == 0
        await store.close()
        return order

    assert asyncio.run(main()) == ["first", "large", "small"]


@pytest.mark.parametrize("limit", [1, 2])
def test_so_many_at_a_time_over_all_processes(server: StoreServer, limit: int) -> None:
    """Three gates over one store: first come first served."""

    async def main() -> tuple[list[int], int]:
        stores = [await AsyncDaemonStore.connect(server.address, name="gate") for _ in range(3)]
        gates = [Gate(store, timeout_s=30.0, max_concurrency=limit) for store in stores]
        order: list[int] = []
        inside = most = 0
        go_on = asyncio.Event()

        async def one(number: int) -> None:
            nonlocal inside, most
            async with gates[number % 3].reserve(f"r{number}", {FEATURES: 1000}):
                order.append(number)
                inside += 1
                most = max(most, inside)
                await go_on.wait()
                await asyncio.sleep(0.001)
                inside -= 1

        async with asyncio.TaskGroup() as group:
            for number in range(9):
                group.create_task(one(number))
                while (await places(stores[0]))[2] <= number:
                    await asyncio.sleep(0.001)
            assert await places(stores[0]) == (limit, 9 - limit, 9)
            go_on.set()
        while (await places(stores[0]))[2]:
            await asyncio.sleep(0.001)
        for store in stores:
            await store.close()
        return order, most

    order, most = asyncio.run(main())
    # With two places, whose answer is read first of two that were sent at once is by chance.
    assert all(abs(number - place) < limit for place, number in enumerate(order))
    assert most == limit


async def places(store: AsyncDaemonStore) -> tuple[int, int, int]:
    """Of the count gate: taken, waited for, and both."""
    slots = (await store.stat()).slots.get("preprocess", m.SlotStatistics(0, 0))
    return slots.num_taken, slots.num_queued, slots.num_taken + slots.num_queued


@pytest.mark.parametrize("how", ["timeout", "cancelled", "refused", "other process dies"])
def test_who_does_not_get_its_turn_leaves_nothing(server: StoreServer, how: str) -> None:
    async def main() -> None:
        holder = await AsyncDaemonStore.connect(server.address, name="holder")
        store = await AsyncDaemonStore.connect(server.address, name="gate", writable=True)
        await Gate(holder, timeout_s=30.0, max_concurrency=1).enter("held")
        gate = Gate(store, timeout_s=0.05 if how == "timeout" else 30.0, max_concurrency=1)
        waiting = asyncio.create_task(gate.enter("r"))
        if how == "timeout":
            with pytest.raises(DeadlineExceeded) as late:
                await waiting
            assert late.value.retry_after_s >= 1.0
        elif how == "refused":
            while (await places(holder))[1] == 0:
                await asyncio.sleep(0.001)
            with pytest.raises(SlotTaken):
                await store.enter("q", "preprocess", limit=1, queue=False)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        else:
            while (await places(holder))[1] == 0:
                await asyncio.sleep(0.001)
            if how == "cancelled":
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            else:
                await holder.close()
                await waiting
                assert (await places(store))[0] == 1
                store.forget("r")
        await holder.close()
        while (await places(store))[2]:
            await asyncio.sleep(0.001)
        assert gate.num_waiting == 0
        await store.close()

    asyncio.run(main())
