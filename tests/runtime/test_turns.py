"""Who does something again and again in one event loop wakes up with the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
import uvloop

from afferent.runtime.turns import next_turn

pytestmark = pytest.mark.timeout(60)

PERIOD_S = 0.05
EARLY_S = 0.002
"""The clock of an event loop may have milliseconds."""

loops = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


@loops
def test_all_go_on_together(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    order: list[tuple[float, int]] = []

    async def wait(number: int) -> None:
        for _ in range(5):
            due_s = await next_turn(PERIOD_S)
            order.append((due_s, number))

    async def main() -> None:
        await asyncio.gather(*map(wait, range(3)))

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    due = sorted({due_s for due_s, _ in order})
    assert len(due) == 5
    assert order == [(due_s, number) for due_s in due for number in range(3)]


@loops
def test_it_comes_when_it_is_due(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def main() -> None:
        before_s, loop = 0.0, asyncio.get_running_loop()
        for _ in range(5):
            before_call_s = loop.time()
            waiting = asyncio.ensure_future(next_turn(PERIOD_S))
            await asyncio.sleep(0)  # it has looked at the clock, whatever that took
            after_call_s = loop.time()
            due_s = await waiting
            assert time.monotonic() >= due_s - EARLY_S
            assert due_s / PERIOD_S == pytest.approx(round(due_s / PERIOD_S))
            assert due_s >= before_call_s + 0.5 * PERIOD_S - EARLY_S
            assert due_s <= after_call_s + 1.5 * PERIOD_S + EARLY_S
            assert due_s > before_s
            before_s = due_s

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def test_who_is_cancelled_leaves_the_others() -> None:
    async def main() -> None:
        given_up = asyncio.create_task(next_turn(PERIOD_S))
        other = asyncio.create_task(next_turn(PERIOD_S))
        await asyncio.sleep(0)
        given_up.cancel()
        assert await other > 0
        assert given_up.cancelled()

    asyncio.run(main())


def test_each_loop_has_turns_of_its_own() -> None:
    for _ in range(2):  # what an ended loop had waited for is nobody's
        with asyncio.Runner() as runner:
            runner.get_loop().create_task(next_turn(PERIOD_S))
            runner.run(asyncio.sleep(0))
    assert asyncio.run(next_turn(PERIOD_S)) > 0
