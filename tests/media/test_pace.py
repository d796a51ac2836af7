"""Work in many steps yields to other tasks from time to time, but not at every step."""

from __future__ import annotations

import asyncio

import pytest

from afferent.media.body import pace
from afferent.media.body.pace import Pace


@pytest.mark.parametrize(("step_s", "num_turns"), [(0.0, 0), (0.002, 33), (0.006, 100)])
def test_others_have_their_turn(
    step_s: float, num_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def main() -> int:
        nonlocal now_s
        beside = asyncio.create_task(other())
        await asyncio.sleep(0)  # the task begins
        steady = Pace()
        for _ in range(100):
            now_s += step_s
            await steady.rest()
        beside.cancel()
        return turns

    monkeypatch.setattr(pace.time, "perf_counter", lambda: now_s)
    assert abs(asyncio.run(main()) - num_turns) <= 1
