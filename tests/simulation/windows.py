"""Faults between any two adjacent system calls of a process.

The faults of a seed strike at random; a window of two lines is seldom hit. Here a small plan runs
without faults once, to count the system calls of each process. Then it runs again and again: the
first process of a name is killed, or stopped for a while, before its first call, before its second,
and so on. Between two calls a process changes nothing that others see but bytes of its own blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.simulation.drawing import plan_of
from tests.simulation.oracle import Observed
from tests.simulation.plan import Plan, Task
from tests.simulation.promptness import Promptness
from tests.simulation.server import build
from tests.simulation.world import World

STOPPED_S = 0.7
_NEVER = 10**9


@dataclass(frozen=True, slots=True)
class Window:
    """A fault before one system call of one process.

    ``what`` is "crash", "pause", or the name of a process that dies while this one is stopped.
    """

    name: str
    call: int
    what: str


def small_plan() -> Plan:
    """Return a plan of a frontend, a program and a worker that make, read, derive and reserve."""
    base = plan_of(0)
    whats = [
        *(("front-0", what) for what in ("media", "room", "permit")),
        *(("lib-0", what) for what in ("claim", "derive", "leave", "private")),
    ]
    tasks = tuple(
        Task(number, client, 0.03 * number, what, number)
        for number, (client, what) in enumerate(whats, start=1)
    )
    return replace(
        base,
        seed=1,
        capacity_nbytes=8 * 1024,
        frontends=("front-0",),
        libraries=("lib-0",),
        workers=("work-0",),
        num_keys=2,
        poison=-1,
        permits=1,
        timeout_s=2.0,
        recovery_timeout_s=None,
        table_rows=16,
        num_pids=100,
        has_peer_pidfds=True,
        rules=replace(base.rules, capacity_nbytes=200_000, slow_one_in=500),
        validates_every=1,
        ranks=(),
        tiers=(),
        tasks=tasks,
        faults=(),
    )


def run_window(plan: Plan, window: Window | None) -> tuple[str, dict[str, int]]:
    """Return the first violation, and the number of system calls of each process."""
    world = build(plan)
    Observed.oracle, Promptness.current = world.oracle, world.oracle.prompt
    calls: dict[str, int] = {}
    first, heal = dict(world.processes), world.heal

    def count() -> None:
        calls.update((name, _NEVER - (each.crash_after or 0)) for name, each in first.items())
        heal()

    world.heal = count  # type: ignore[method-assign]
    try:
        for process in first.values():
            process.crash_after = _NEVER
        if window is not None:
            _arrange(world, window)
        world.run()
        return next(iter(world.machine.violations), ""), calls
    finally:
        world.close()


def _arrange(world: World, window: Window) -> None:
    process = world.processes[window.name]
    if window.what == "crash":
        process.crash_after = window.call
        return
    process.pause_after = window.call
    pause = process.pause

    def paused() -> None:
        pause()
        world.oracle.prompt.trouble(window.name, STOPPED_S)
        world.machine.after(STOPPED_S, process.resume)
        if window.what != "pause":
            world.machine.after(STOPPED_S / 2, world.machine.kill, world.processes[window.what])

    process.pause = paused  # type: ignore[method-assign]


def windows(plan: Plan, names: tuple[str, ...], whats: tuple[str, ...]) -> Iterator[Window]:
    """Yield each window of these processes, with each of these faults."""
    _, calls = run_window(plan, None)
    for name in names:
        for call in range(1, calls[name] + 1):
            for what in whats:
                yield Window(name, call, what)
