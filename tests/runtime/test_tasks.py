"""Threads for which an event loop waits, or does not wait."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from afferent.runtime.tasks import in_pool, in_thread, open_in_thread


def test_what_a_thread_returns_and_raises() -> None:
    assert asyncio.run(in_thread(divmod, 7, 2)) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_thread(divmod, 7, 0))


@pytest.mark.parametrize("fails", [False, True])
def test_a_thread_is_over_when_its_cancellation_comes_through(fails: bool) -> None:
    begun, go_on, is_over = threading.Event(), threading.Event(), False

    def work() -> None:
        nonlocal is_over
        begun.set()
        assert go_on.wait(60)
        is_over = True
        if fails:
            raise ValueError

    async def main() -> None:
        task = asyncio.create_task(in_thread(work))
        await asyncio.to_thread(begun.wait, 60)
        for _ in range(2):  # repeated cancellations wait, too
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert is_over

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_pool_makes_for_nobody_is_undone(fails: bool) -> None:
    begun, go_on, undone = threading.Event(), threading.Event(), list[int]()

    def work() -> int:
        begun.set()
        assert go_on.wait(60)
        return 7 // (0 if fails else 1)

    async def main() -> None:
        with ThreadPoolExecutor(1) as pool:
            task = asyncio.create_task(in_pool(pool, work, undone.append))
            await asyncio.to_thread(begun.wait, 60)
            task.cancel()
            await asyncio.sleep(0)
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert undone == ([] if fails else [7])
            assert await in_pool(pool, lambda: 8, undone.append) == 8

    asyncio.run(main())
    assert undone == ([] if fails else [7])


def test_what_a_thread_opens_is_its_callers() -> None:
    closed: list[int] = []
    assert asyncio.run(open_in_thread(lambda: 7, closed.append)) == 7
    with pytest.raises(ZeroDivisionError):
        asyncio.run(open_in_thread(lambda: 7 // 0, closed.append))
    assert closed == []


@pytest.mark.parametrize("is_opened_first", [False, True])
def test_what_is_opened_for_nobody_is_closed(is_opened_first: bool) -> None:
    """The caller is cancelled before the open, or after it and before the result arrives."""
    begun, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    what_closed: list[int] = []

    def open_() -> int:
        begun.set()
        assert go_on.wait(60)
        return 7

    def close(opened: int) -> None:
        what_closed.append(opened)
        closed.set()

    async def main() -> None:
        threads = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(threads)
        task = asyncio.create_task(open_in_thread(open_, close))
        await asyncio.sleep(0)
        assert begun.wait(60)
        if is_opened_first:  # the event loop has not been notified yet
            go_on.set()
            threads.submit(int).result(60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(main())
    assert closed.wait(60)
    assert what_closed == [7]
