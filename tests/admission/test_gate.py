"""The gate alone: waits, refusals with a retry time, and releases."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from afferent.admission.gate import ADMISSION_SECONDS, PERMIT_SECONDS, Gate
from afferent.admission.permits import PermitStatistics
from afferent.errors import ArenaTooSmall, DeadlineExceeded, NoPermitLeft, StoreFull
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.types import CreateItem, Handle, MiB, ObjectKind, ReserveItem

FEATURES = ObjectKind.FEATURES
CAPACITY = 4 * MiB


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with StoreServer(CAPACITY, shares={FEATURES: 1.0}) as made:
        yield made


class FakeBudget:
    """A budget that grants after a given time, on a simulated clock."""

    def __init__(self) -> None:
        self.now_s, self.wait_s = 100.0, 0.0
        self.refusal: type[Exception] | None = None
        self.forgotten: list[str] = []

    async def reserve(
        self, request: str, items: Sequence[ReserveItem], *, timeout_s: float
    ) -> None:
        await asyncio.sleep(0)
        self.now_s += self.wait_s
        if self.refusal is not None:
            raise self.refusal("no")

    async def create(self, request: str, items: Sequence[CreateItem]) -> list[Handle]:
        raise AssertionError

    async def acquire_permit(
        self, request: str, semaphore: str, *, limit: int, number: int = 1, timeout_s: float
    ) -> None:
        assert (semaphore, number) == ("preprocess", 1)
        await self.reserve(request, [], timeout_s=timeout_s)

    def release_permit(self, request: str, semaphore: str) -> None:
        raise AssertionError

    def accepted(self, request: str, semaphores: Sequence[str]) -> None:
        raise AssertionError

    def forget(self, request: str) -> None:
        self.forgotten.append(request)


def test_a_refusal_says_when_to_try_again() -> None:
    budget = FakeBudget()
    gate = Gate(budget, timeout_s=5.0, clock=lambda: budget.now_s)

    async def main() -> None:
        assert gate.retry_after_s == 1.0
        budget.wait_s = 4.0
        for _ in range(10):  # one grant every four seconds
            await gate.admit("r", [ReserveItem(FEATURES, 10)])
        budget.refusal = DeadlineExceeded
        with pytest.raises(DeadlineExceeded) as refused:
            await gate.admit("r", [ReserveItem(FEATURES, 10)])
        assert 4.0 <= refused.value.retry_after_s <= 10.0
        budget.refusal, budget.wait_s = StoreFull, 0.0
        many = [gate.admit(f"{n}", [ReserveItem(FEATURES, 10)]) for n in range(8)]
        errors = await asyncio.gather(*many, return_exceptions=True)
        longest = max(error.retry_after_s for error in errors)  # type: ignore[union-attr]
        assert 20.0 <= longest <= 60.0

    asyncio.run(main())
    assert gate.num_waiting == 0
    *counts, seconds = ADMISSION_SECONDS.labels().values
    assert sum(counts) == 19
    assert counts[ADMISSION_SECONDS.declaration.buckets.index(5.0)] == 11, "those in vain, too"
    assert seconds == 11 * 4.0


def test_forwarded_media_take_what_the_engine_makes_of_them_and_a_turn() -> None:
    class Permits(FakeBudget):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[tuple[str, int, int]] = []
            self.left: list[tuple[str, Sequence[str]]] = []

        async def acquire_permit(
            self, request: str, semaphore: str, *, limit: int, number: int = 1, timeout_s: float
        ) -> None:
            self.asked.append((semaphore, limit, number))

        def accepted(self, request: str, semaphores: Sequence[str]) -> None:
            self.left.append((request, semaphores))

    async def main() -> None:
        budget = Permits()
        for most, expected in ((0, []), (3, [("preprocess", 3, 1)])):
            gate = Gate(budget, timeout_s=5.0, max_concurrency=most)
            await gate.enter_forwarded("r", 2 * MiB + 1, limit_nbytes=64 * MiB)
            assert budget.asked == [("forwarded", 64, 3), *expected]
            budget.asked.clear()
        gate.leave("r")
        assert budget.left == [("r", ("preprocess", "forwarded"))]

    asyncio.run(main())


def test_large_bodies_take_turns_and_small_ones_do_not() -> None:
    """A body of at most 2 of 64 MiB needs no permits; one tenant gets at most half of them."""

    class Permits(FakeBudget):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[tuple[str, int, int]] = []

        async def acquire_permit(
            self, request: str, semaphore: str, *, limit: int, number: int = 1, timeout_s: float
        ) -> None:
            self.asked.append((semaphore, limit, number))

        def release_permit(self, request: str, semaphore: str) -> None:
            self.asked.append((semaphore, 0, 0))

    async def main() -> None:
        budget = Permits()
        gate = Gate(budget, timeout_s=5.0, max_uploads_nbytes=64 * MiB)
        small = 2 * MiB
        assert not await gate.begin_upload("r", small)
        assert not await Gate(budget, timeout_s=5.0).begin_upload("r", 64 * MiB), "nobody counts"
        assert budget.asked == []
        assert await gate.begin_upload("r", small + 1)
        assert await gate.begin_upload("r", 9 * MiB + 1, tenant="anna")
        gate.end_upload("r", tenant="anna")
        assert budget.asked == [
            ("uploads", 64, (small + 1 + MiB - 1) // MiB),
            ("uploads_of/anna", 32, 10),
            ("uploads", 64, 10),
            ("uploads", 0, 0),
            ("uploads_of/anna", 0, 0),
        ]

    asyncio.run(main())


def test_only_what_was_granted_lately_says_when_to_try_again() -> None:
    budget = FakeBudget()
    gate = Gate(budget, timeout_s=40.0, clock=lambda: budget.now_s)

    async def retry_after_s() -> float:
        budget.refusal = DeadlineExceeded
        with pytest.raises(DeadlineExceeded) as refused:
            await gate.admit("r", [ReserveItem(FEATURES, 10)])
        budget.refusal = None
        return refused.value.retry_after_s

    async def main() -> None:
        for _ in range(10):
            await gate.admit("r", [ReserveItem(FEATURES, 10)])
        budget.now_s += 61.0
        assert await retry_after_s() == 40.0, "nothing has moved for a minute"
        for _ in range(10):  # ten grants a second: earlier grants do not matter
            budget.now_s += 0.1
            await gate.admit("r", [ReserveItem(FEATURES, 10)])
        assert await retry_after_s() == 1.0
        budget.now_s += 50.0
        for _ in range(32):  # earlier grants are forgotten
            await gate.admit("r", [ReserveItem(FEATURES, 10)])
        assert await retry_after_s() == 1.0

    asyncio.run(main())


def told(gate: Gate, budget: FakeBudget, *, num_waiting: int = 1) -> list[float]:
    """Return the retry times of requests that are refused together."""
    room = [ReserveItem(FEATURES, 10)]

    async def main() -> list[float]:
        refused = [gate.admit(f"{n}", room) for n in range(num_waiting)]
        errors = await asyncio.gather(*refused, return_exceptions=True)
        return [error.retry_after_s for error in errors if isinstance(error, StoreFull)]

    budget.refusal, budget.wait_s = StoreFull, 0.0
    heard = asyncio.run(main())
    budget.refusal = None
    return heard


def grant(gate: Gate, budget: FakeBudget, *, times: int, every_s: float) -> None:
    async def main() -> None:
        for _ in range(times):
            await gate.admit("r", [ReserveItem(FEATURES, 10)])

    budget.wait_s = every_s
    asyncio.run(main())


def test_the_rate_is_that_of_the_last_minute() -> None:
    budget = FakeBudget()
    gate = Gate(budget, timeout_s=5.0, clock=lambda: budget.now_s)
    assert told(gate, budget) == [5.0]  # no grant yet
    grant(gate, budget, times=1, every_s=1.0)
    budget.now_s += 20.0
    assert told(gate, budget) == [5.0]  # one grant gives no rate
    grant(gate, budget, times=1, every_s=20.0)
    # Two grants within 40 s, so one in 20 s: the waiting request is first, this client second.
    assert told(gate, budget) == [20.0 * 2]
    budget.now_s += 20.0
    assert told(gate, budget) == [30.0 * 2]  # grants of the last minute count
    budget.now_s += 0.5
    assert told(gate, budget) == [5.0]  # older grants do not
    grant(gate, budget, times=3, every_s=2.0)
    budget.now_s += 2.0
    # The second grant is 28.5 s old and counts; the first one does not.
    assert told(gate, budget) == [15.0]
    budget.now_s += 120.0
    assert told(gate, budget) == [5.0]


def test_who_waits_is_counted() -> None:
    budget = FakeBudget()
    gate = Gate(budget, timeout_s=5.0, clock=lambda: budget.now_s)
    grant(gate, budget, times=10, every_s=1.0)
    budget.now_s += 1.0
    assert told(gate, budget, num_waiting=4) == [5.0, 4.0, 3.0, 2.0]
    # Refusals do not count as grants.
    assert told(gate, budget) == [2.0]
    assert max(told(gate, budget, num_waiting=100)) == 60.0


def test_who_finds_no_place_hears_when_to_try_again() -> None:
    budget = FakeBudget()
    gate = Gate(budget, timeout_s=7.0, max_concurrency=1, clock=lambda: budget.now_s)
    budget.refusal, budget.wait_s = NoPermitLeft, 3.0

    async def main() -> None:
        with pytest.raises(NoPermitLeft) as refused:
            await gate.enter("r")
        assert refused.value.retry_after_s == 7.0
        waiting = [asyncio.ensure_future(gate.enter("q")) for _ in range(2)]
        await asyncio.sleep(0)
        assert gate.num_waiting == 2
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(main())
    assert gate.num_waiting == 0
    *counts, seconds = PERMIT_SECONDS.labels().values
    assert (sum(counts), seconds) == (3, 3.0 + 3.0 + 6.0), "those in vain, too"


@pytest.mark.parametrize("error", [None, ValueError("inside"), asyncio.CancelledError()])
def test_what_was_reserved_goes_with_the_block(error: BaseException | None) -> None:
    budget = FakeBudget()

    async def main() -> None:
        async with Gate(budget, timeout_s=1.0).reserve("r", {FEATURES: 100}):
            assert budget.forgotten == []
            if error is not None:
                raise error

    if error is None:
        asyncio.run(main())
    else:
        with pytest.raises(type(error)):
            asyncio.run(main())
    assert budget.forgotten == ["r"]


def test_a_block_that_is_not_entered_holds_nothing() -> None:
    budget = FakeBudget()
    budget.refusal = StoreFull

    async def main() -> None:
        with pytest.raises(StoreFull):
            async with Gate(budget, timeout_s=1.0).reserve("r", {FEATURES: 100}):
                raise AssertionError

    asyncio.run(main())
    assert budget.forgotten == []


def test_the_budget_is_hard_and_in_order(server: StoreServer) -> None:
    """Ten requests of a third of the arena each: at most three run at a time, in order."""

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
        assert (figures.reserved_nbytes, figures.num_reservations_queued) == (0, 0)
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
        await holder.reserve("held", [ReserveItem(FEATURES, CAPACITY * 3 // 4)])
        gate = Gate(store, timeout_s=0.05 if how == "timeout" else 30.0)
        nbytes = 2 * CAPACITY if how == "never fits" else CAPACITY // 2

        async def ask() -> None:
            if wants == "room":
                await gate.admit("r", [ReserveItem(FEATURES, nbytes)])
            else:
                await gate.create("r", [CreateItem(FEATURES, nbytes)])

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
            else:  # its memory is free, and the waiting request is admitted
                await holder.close()
                await waiting
                store.forget("r")
        await holder.close()
        while (await store.stat()).reserved_nbytes:
            await asyncio.sleep(0.001)
        assert (await store.stat()).num_reservations_queued == 0
        await store.close()

    asyncio.run(main())


def test_blocks_are_given_at_once_where_nobody_waits(server: StoreServer) -> None:
    """A small block does not wait for a large one that waits for space."""

    async def main() -> list[str]:
        store = await AsyncDaemonStore.connect(server.address, name="gate", writable=True)
        gate = Gate(store, timeout_s=30.0)
        order: list[str] = []

        async def one(name: str, nbytes: int) -> None:
            (handle,) = await gate.create(name, [CreateItem(FEATURES, nbytes)])
            assert handle.nbytes == nbytes
            order.append(name)

        await one("first", CAPACITY // 2)
        assert (await store.stat()).reserved_nbytes == 0
        waiting = []
        for number, (name, nbytes) in enumerate([("large", CAPACITY * 3 // 4), ("small", 1000)]):
            waiting.append(asyncio.create_task(one(name, nbytes)))
            while (await store.stat()).num_reservations_queued + len(order) < number + 2:
                await asyncio.sleep(0.001)
        assert gate.num_waiting == 1
        for name in order:
            store.forget(name)
        await asyncio.gather(*waiting)
        assert (await store.stat()).reserved_nbytes == 0
        for name in order:
            store.forget(name)
        assert (await store.stat()).held_nbytes == 0
        await store.close()
        return order

    assert asyncio.run(main()) == ["first", "small", "large"]


@pytest.mark.parametrize("limit", [1, 2])
def test_so_many_at_a_time_over_all_processes(server: StoreServer, limit: int) -> None:
    """Three gates share one store, which grants in the order of arrival."""

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
    # With two permits, the order of two requests that are granted at once is random.
    assert all(abs(number - place) < limit for place, number in enumerate(order))
    assert most == limit


async def places(store: AsyncDaemonStore) -> tuple[int, int, int]:
    """Return the held permits, the queued ones, and the sum, of the semaphore for preprocessing."""
    slots = (await store.stat()).permits.get("preprocess", PermitStatistics(0, 0))
    return slots.num_held, slots.num_queued, slots.num_held + slots.num_queued


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
            with pytest.raises(NoPermitLeft):
                await store.acquire_permit("q", "preprocess", limit=1, queue=False)
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
