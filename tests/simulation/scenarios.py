"""Plans that are changed so that rare conditions coincide."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.simulation.plan import FAULTS, TROUBLE_S, Fault, Plan


def changed(plan: Plan) -> Plan:
    """Return the plan, changed if the number of its seed says so."""
    match plan.seed % 50:
        case 37:
            return _with_holes(plan)
        case 7:
            return _with_late_permits(plan)
        case 13:
            return _with_torn_messages(plan)
        case 23:
            return _with_lost_sources(plan)
        case 27:
            return _with_tier(plan)
        case 33:
            return _with_an_epoch_after(plan)
        case 43:
            return _with_early_deaths(plan)
        case 45:
            return _with_a_dying_core(_with_engine(plan))
        case 19 | 47:
            return _with_vllm(plan)
    return _with_engine(plan) if plan.seed % 10 == 5 else plan


def _with_tier(plan: Plan) -> Plan:
    """Add the processes that use a tier, and let most faults strike these."""
    rng = random.Random(f"tier {plan.seed}")
    tiers, frontend = ("tier-fetch", "tier-keep"), plan.frontends[0]
    return replace(
        plan,
        tiers=tiers,
        table_rows=plan.table_rows + len(tiers),
        num_pids=plan.num_pids + len(tiers),
        faults=tuple(
            replace(fault, target=rng.choice(tiers)) if rng.random() < 0.6 else fault
            for fault in plan.faults
        ),
        tasks=tuple(
            replace(task, client=frontend, what="media") if rng.random() < 0.6 else task
            for task in plan.tasks
        ),
    )


def _with_late_permits(plan: Plan) -> Plan:
    """Programs cancel calls for a semaphore with a single permit."""
    rng = random.Random(f"late permits {plan.seed}")
    return replace(
        plan,
        tasks=tuple(
            replace(task, client=rng.choice(plan.libraries), what="late-permit")
            if rng.random() < 0.5
            else task
            for task in plan.tasks
        ),
    )


def _with_torn_messages(plan: Plan) -> Plan:
    """Long messages are cancelled while the socket buffer is too small for them."""
    rng = random.Random(f"torn {plan.seed}")
    return replace(
        plan,
        rules=replace(plan.rules, capacity_nbytes=100),
        # Clocks stay as they are, so that a deadline of ten seconds is not reached early.
        faults=tuple(
            replace(fault, what="cut") if fault.what in ("jump", "drift") else fault
            for fault in plan.faults
        ),
        tasks=tuple(
            replace(task, client=rng.choice(plan.libraries), what="long")
            if rng.random() < 0.5
            else task
            for task in plan.tasks
        ),
    )


def _with_lost_sources(plan: Plan) -> Plan:
    """Programs compute from objects that they had pinned before their connection was cut."""
    rng = random.Random(f"sources {plan.seed}")
    numbers = iter(range(len(plan.tasks) + 1, 1000))
    tasks, cuts = [], []
    for task in plan.tasks:
        what, client = rng.choice(("claim", "derive", "drop")), rng.choice(plan.libraries)
        at_s = {"claim": 0.0, "derive": 0.3, "drop": 0.4}[what] + rng.random() * 0.2
        tasks.append(replace(task, client=client, what=what, at_s=at_s))
        if what == "derive":
            cut_s = at_s + rng.random() * 0.05
            cuts.append(Fault(next(numbers), cut_s, "cut", client, 0.01))
    return replace(plan, tasks=tuple(tasks), faults=tuple(cuts))


def _with_holes(plan: Plan) -> Plan:
    """Free space is fragmented, so that reserved bytes find no extent, while faults strike."""
    rng = random.Random(f"holes {plan.seed}")
    moments = [rng.random() * TROUBLE_S * 0.6 for _ in range(2)]
    clients = (*plan.frontends, *plan.libraries, *plan.workers)
    tasks, numbers = [], iter(range(len(plan.tasks) + 1, 1000))
    for task in plan.tasks:
        at_s = rng.choice(moments)
        if rng.random() < 0.4:
            client, what = rng.choice(plan.libraries), "scatter"
        else:
            client, what = plan.frontends[0], rng.choice(("media", "room", "room"))
            at_s += 0.3 * rng.random()
        tasks.append(replace(task, client=client, what=what, at_s=at_s))
    faults = [
        Fault(
            next(numbers),
            at_s + spread_s * rng.random(),
            rng.choice(FAULTS),
            rng.choice(clients),
            rng.choice((0.01, 0.1, 0.5)),
        )
        for at_s, spread_s in ((0.0, 5e-3), *((rng.choice(moments), 0.6) for _ in range(6)))
    ]
    return replace(
        plan,
        capacity_nbytes=16 * 1024,
        timeout_s=max(plan.timeout_s, 0.5),
        tasks=tuple(tasks),
        faults=tuple(faults),
    )


def _with_an_epoch_after(plan: Plan) -> Plan:
    """Programs use handles of one daemon while the next one reuses the same offsets."""
    rng = random.Random(f"epoch {plan.seed}")
    ends_s = TROUBLE_S * (0.2 + 0.3 * rng.random())
    tasks = []
    for task in plan.tasks:
        what, at_s = "claim", rng.random() * ends_s
        if rng.random() < 0.6:
            what, at_s = rng.choice(("claim", "old", "old")), ends_s + rng.random()
        client = rng.choice(plan.libraries)
        tasks.append(replace(task, client=client, what=what, at_s=at_s))
    faults = list(plan.faults[1:])
    number = plan.faults[0].number if plan.faults else len(plan.tasks) + 1
    faults.append(Fault(number, ends_s, "crash", "daemon", 0.1))
    return replace(plan, tasks=tuple(tasks), faults=tuple(faults))


def _with_early_deaths(plan: Plan) -> Plan:
    """Clients die just after they have connected, while the daemon is stopped."""
    rng = random.Random(f"early {plan.seed}")
    numbers = iter(range(len(plan.tasks) + 1, 1000))
    clients = (*plan.frontends, *plan.libraries, *plan.workers)
    stops = [Fault(next(numbers), rng.random() * 1e-3, "pause", "daemon", 0.2)]
    deaths = [
        Fault(next(numbers), rng.random() * 0.02, "crash", rng.choice(clients), 0.1)
        for _ in range(rng.randint(1, 4))
    ]
    return replace(
        plan,
        tasks=tuple(replace(task, at_s=rng.random() * 0.01) for task in plan.tasks),
        faults=(*stops, *deaths),
    )


def _with_a_dying_core(plan: Plan) -> Plan:
    """The core dies while workers do its step, and other clients delete what the workers read."""
    rng = random.Random(f"core {plan.seed}")
    tasks, dies_s = [], sorted(rng.random() * TROUBLE_S * 0.5 for _ in range(3))
    for task in plan.tasks:
        after_s = rng.choice(dies_s)
        if task.client in plan.libraries:
            tasks.append(replace(task, what="drop", at_s=after_s + 0.1 * rng.random()))
        else:
            tasks.append(replace(task, what="media", at_s=max(after_s - 0.2 * rng.random(), 0.0)))
    numbers = iter(range(len(plan.tasks) + 1, 1000))
    deaths = [Fault(next(numbers), at_s, "crash", "core", 0.1) for at_s in dies_s]
    return replace(plan, tasks=tuple(tasks), faults=tuple(deaths))


def _with_engine(plan: Plan) -> Plan:
    """Add an engine core and its workers, and let most faults strike these."""
    rng = random.Random(f"engine {plan.seed}")
    ranks = tuple(f"rank-{i}" for i in range(rng.choice((1, 1, 2))))
    frontend = plan.frontends[0]
    return replace(
        plan,
        ranks=ranks,
        table_rows=plan.table_rows + len(ranks) + 1,
        num_pids=plan.num_pids + len(ranks) + 1,
        faults=tuple(
            replace(fault, target=rng.choice(("core", *ranks))) if rng.random() < 0.6 else fault
            for fault in plan.faults
        ),
        tasks=tuple(
            replace(task, client=frontend, what="media") if rng.random() < 0.5 else task
            for task in plan.tasks
        ),
    )


def _with_vllm(plan: Plan) -> Plan:
    """Add a vLLM; other clients delete and overwrite what it reads, and its processes die."""
    rng = random.Random(f"vllm {plan.seed}")
    frontend, numbers = plan.frontends[0], iter(range(2000, 3000))
    moments = [rng.random() * TROUBLE_S * 0.6 for _ in range(2)]
    tasks, faults = [], list(plan.faults)
    for task in plan.tasks:
        at_s = rng.choice(moments) + 0.5 * rng.random()
        if rng.random() < 0.6:
            tasks.append(replace(task, client=frontend, what="media", at_s=at_s))
        else:
            what = rng.choice(("drop", "private", "private", "claim"))
            client = rng.choice(plan.libraries)
            tasks.append(replace(task, client=client, what=what, at_s=at_s + 0.3))
    for at_s in moments:
        victim = rng.choice(("daemon", "daemon", "vllm-core", "vllm-core", "vllm-worker"))
        what = rng.choice(("crash", "crash", "crash", "pause", "cut"))
        length_s = rng.choice((0.1, 0.5))
        faults.append(Fault(next(numbers), at_s + 0.6 * rng.random(), what, victim, length_s))
    return replace(
        plan,
        has_vllm=True,
        capacity_nbytes=4096,
        timeout_s=max(plan.timeout_s, 0.5),
        table_rows=plan.table_rows + 2,
        num_pids=plan.num_pids + 2,
        tasks=tuple(tasks),
        faults=tuple(faults),
    )
