"""The plan of a seed."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.plan import ASYNC_TASKS, FAULTS, SYNC_TASKS, TROUBLE_S, Fault, Plan, Task
from tests.simulation.scenarios import changed
from tests.simulator.sockets import LinkRules


def plan_of(seed: int) -> Plan:
    """Return a seed's plan, which must never change: tests name seeds that once failed."""
    rng = random.Random(seed)
    frontends = tuple(f"front-{i}" for i in range(rng.choice((1, 1, 2))))
    libraries = tuple(f"lib-{i}" for i in range(rng.choice((1, 2, 2, 3))))
    workers = tuple(f"work-{i}" for i in range(rng.choice((1, 1, 2, 3))))
    kinds = [kind for kind in FAULTS if rng.random() < 0.5] if rng.random() < 0.9 else []
    num_tasks, num_faults = rng.randint(3, 20), rng.randint(1, 6) if kinds else 0
    everyone = ("daemon", "daemon", *frontends, *libraries, *workers)
    num_keys = rng.choice((1, 2, 3, 6))
    numbers = iter(range(1, 1000))
    plan = Plan(
        seed=seed,
        capacity_nbytes=rng.choice((4, 8, 8, 16)) * 1024,
        frontends=frontends,
        libraries=libraries,
        workers=workers,
        num_keys=num_keys,
        poison=rng.randrange(num_keys) if rng.random() < 0.2 else -1,
        permits=rng.choice((0, 1, 2)),
        weights=tuple(rng.choice((1.0, 1.0, 3.0)) for _ in range(2)),
        timeout_s=rng.choice((0.05, 0.5, 2.0)),
        job_timeout_s=rng.choice((0.5, 1.0)),
        recovery_timeout_s=rng.choice((None, 0.3, 1.0)),
        table_rows=len(frontends + libraries + workers) + rng.choice((1, 2, 16, 16)),
        num_pids=len(frontends + libraries + workers) + rng.choice((4, 100)),
        has_peer_pidfds=rng.random() < 0.7,
        rules=LinkRules(
            slow_one_in=rng.choice((5, 50, 500)),
            capacity_nbytes=rng.choice((100, 1000, 200_000, 200_000)),
        ),
        validates_every=rng.choice((1, 8, 8, 8)),
        failure_rates={
            name: rng.choice((0.02, 0.2))
            for name in ("mmap", "connect", "recv_fds", "accept", "fallocate")
        },
    )
    # With few kinds of tasks, each pair of kinds meets more often than with all of them.
    for_frontends = rng.sample(ASYNC_TASKS, rng.randint(1, 4))
    for_libraries = rng.sample(SYNC_TASKS, rng.randint(1, 5))
    clients = [(name, for_frontends) for name in frontends]
    clients += [(name, for_libraries) for name in libraries]
    # Most tasks begin at a few moments, close to each other.
    moments = [rng.random() * TROUBLE_S * 0.6 for _ in range(rng.randint(1, 4))]
    spread_s = rng.choice((1e-3, 2e-2, 0.3))
    tasks = []
    for _ in range(num_tasks):
        name, what = rng.choice(clients)
        at_s = rng.choice(moments) + rng.random() * spread_s
        tasks.append(Task(next(numbers), name, at_s, rng.choice(what), rng.getrandbits(32)))
    faults = [
        Fault(
            next(numbers),
            rng.random() * TROUBLE_S * 0.8,
            rng.choice(kinds),
            rng.choice(everyone),
            rng.choice((0.01, 0.1, 0.5, 1.5)),
        )
        for _ in range(num_faults)
    ]
    # Most faults strike shortly after a task has begun.
    faults = [
        replace(fault, at_s=rng.choice(tasks).at_s + rng.choice((2e-3, 2e-2)) * rng.random())
        if rng.random() < 0.8
        else fault
        for fault in faults
    ]
    plan = replace(plan, tasks=tuple(tasks), faults=tuple(faults))
    return changed(plan)
