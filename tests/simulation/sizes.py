"""Sizes of objects and limits of calls, for all roles."""

from __future__ import annotations

from typing import TypeVar

from tests.simulation.oracle import LINE_NBYTES
from tests.simulation.plan import Plan
from tests.simulation.world import World
from tests.simulator import threads
from tests.simulator.machine import Process

T = TypeVar("T")

DERIVED = 1000
"""The object that is computed from the features of key ``n`` has the number ``n + DERIVED``."""
RAW = 5000
"""The raw media of the features ``n`` have the number ``n + RAW``, and no key."""
_SLACK_S = 0.5
TENANTS = ("anna", "ben")


def lines_of(plan: Plan, what: int) -> int:
    """Return the number of lines of an object: always the same for the same key."""
    return 1 + (plan.seed + 7 * what) % (plan.capacity_nbytes // LINE_NBYTES // 6)


def sleep(seconds: float) -> None:
    threads.current().wait(seconds)


class Limit:
    """Checks from outside that a call ends by its deadline."""

    def __init__(self, world: World, process: Process, what: str, limit_s: float) -> None:
        self._world, self._process, self._what = world, process, what
        self._limit_s = limit_s
        self._start_s = world.machine.now_s
        self._paused_s = process.paused_s

    def check(self) -> None:
        if not self._process.is_alive:  # it was killed, perhaps while it was paused
            return
        took_s = self._world.machine.now_s - self._start_s
        paused_s = self._process.paused_s - self._paused_s
        limit_s = self._limit_s / 0.7 + paused_s + _SLACK_S
        if took_s > limit_s:
            self._world.machine.violate(
                f"deadline: {self._process.name} waits {took_s:.2f} s for {self._what}, which has "
                f"{limit_s:.2f} s"
            )
