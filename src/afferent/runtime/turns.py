"""What a process does again and again is done together: to wake up costs it more than the doing."""

from __future__ import annotations

import asyncio
import math
import weakref


class _Turn(asyncio.Event):
    def __init__(self, due_s: float) -> None:
        super().__init__()
        self.due_s = due_s


_next: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, _Turn]] = (
    weakref.WeakKeyDictionary()
)


async def next_turn(period_s: float) -> float:
    """Until the next multiple of ``period_s`` of the monotonic clock, on which all go on who wait
    for it in this event loop. Who comes first waits for at least half of it, and at most half as
    long again.

    Returns:
        When it was due, in seconds of that clock.
    """
    loop = asyncio.get_running_loop()
    turns = _next.setdefault(loop, {})
    turn = turns.get(period_s)
    if turn is None:
        # A clock in milliseconds may wake us a little early.
        due_s = (math.floor(loop.time() / period_s + 0.5) + 1) * period_s
        turn = turns[period_s] = _Turn(due_s)
        loop.call_at(due_s, _go_on, turns, period_s)
    await turn.wait()
    return turn.due_s


def _go_on(turns: dict[float, _Turn], period_s: float) -> None:
    turns.pop(period_s).set()
