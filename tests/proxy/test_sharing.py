"""Concurrent callers share one computation, which never began before their calls."""

from __future__ import annotations

import asyncio

import pytest

from afferent.proxy import sharing
from afferent.proxy.sharing import Shared


class Maker:
    def __init__(self) -> None:
        self.num_begun = 0
        self.may_end = asyncio.Event()

    async def make(self) -> int:
        self.num_begun += 1
        number = self.num_begun
        await self.may_end.wait()
        return number


async def until_begun(maker: Maker, number: int) -> None:
    while maker.num_begun < number:
        await asyncio.sleep(0)


async def ask_many() -> None:
    maker = Maker()
    shared = Shared(maker.make)
    first = asyncio.create_task(shared.get())
    await until_begun(maker, 1)
    later = [asyncio.create_task(shared.get()) for _ in range(100)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert maker.num_begun == 1, "one at a time"
    later.pop().cancel()  # the others still get a result
    maker.may_end.set()
    assert await first == 1
    assert await asyncio.gather(*later) == [2] * 99
    assert await shared.get() == 3


def test_who_asks_meanwhile_shares_the_next() -> None:
    asyncio.run(asyncio.wait_for(ask_many(), 30))


async def ask_two() -> list[int]:
    maker = Maker()
    shared = Shared(maker.make)
    first = asyncio.create_task(shared.get())
    await until_begun(maker, 1)
    later = asyncio.create_task(shared.get())
    for _ in range(10):
        await asyncio.sleep(0)
    maker.may_end.set()
    return [await first, await later, await shared.get()]


def test_who_has_waited_for_long_takes_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert asyncio.run(asyncio.wait_for(ask_two(), 30)) == [1, 2, 3]
    monkeypatch.setattr(sharing, "_LONG_S", 0.0)
    assert asyncio.run(asyncio.wait_for(ask_two(), 30)) == [1, 1, 2]


async def fail_once() -> None:
    async def make() -> str:
        nonlocal num_made
        num_made += 1
        if num_made == 1:
            raise ValueError("the first")
        return "made"

    num_made = 0
    shared = Shared(make)
    with pytest.raises(ValueError, match="the first"):
        await shared.get()
    assert await shared.get() == "made"


def test_a_failure_is_not_kept() -> None:
    asyncio.run(asyncio.wait_for(fail_once(), 30))
