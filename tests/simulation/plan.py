"""What a seed stands for: a small server, what its clients do, and what goes wrong.

Every element has a seed of its own, so that one can be left out and the others stay as they are:
that is how a failing history is made shorter.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Final

from afferent.testing.simulation.sockets import LinkRules

TROUBLE_S: Final = 2.0
"""Until then things go wrong; from then on everything has to come to an end."""

NOTHING: Final = "nothing"
FAULTS: Final = ("crash", "pause", "cut", "mute", "jump", "drift", "call", "alloc")
ASYNC_TASKS: Final = (
    *("media", "media", "media", "media", "media", "names", "permit", "permit", "room", "room"),
    "released",
)
SYNC_TASKS: Final = (
    *("claim", "claim", "claim", "read", "read", "old", "old", "private", "share", "share"),
    *("share", "derive", "derive", "drop", "permit", "late", "late", "leave"),
)


@dataclass(frozen=True, slots=True)
class Task:
    """``client`` does ``what``, from ``at_s`` on."""

    number: int
    client: str
    at_s: float
    what: str
    seed: int


@dataclass(frozen=True, slots=True)
class Fault:
    """At ``at_s``, ``what`` befalls ``target``, for ``length_s``."""

    number: int
    at_s: float
    what: str
    target: str
    length_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seed: int
    capacity_nbytes: int
    frontends: tuple[str, ...]
    libraries: tuple[str, ...]
    workers: tuple[str, ...]
    num_keys: int
    poison: int
    """The key whose makers die of it; -1 for none."""
    permits: int
    weights: tuple[float, ...]
    timeout_s: float
    job_timeout_s: float
    recovery_timeout_s: float | None
    table_rows: int
    num_pids: int
    has_peer_pidfds: bool
    rules: LinkRules
    validates_every: int
    ranks: tuple[str, ...] = ()
    """The workers of an engine; without any there is none."""
    tiers: tuple[str, ...] = ()
    """Who fetches and who keeps; without them there is no tier."""
    tasks: tuple[Task, ...] = ()
    faults: tuple[Fault, ...] = ()
    failure_rates: dict[str, float] = field(default_factory=dict)

    @property
    def elements(self) -> list[int]:
        """Numbers of what can be left out."""
        return [each.number for each in (*self.tasks, *self.faults)]

    def without(self, dropped: frozenset[int]) -> Plan:
        """In place of these nothing happens, at the same time: what came before stays as it was."""
        return replace(
            self,
            tasks=tuple(
                replace(each, what=NOTHING) if each.number in dropped else each
                for each in self.tasks
            ),
            faults=tuple(
                replace(each, what=NOTHING) if each.number in dropped else each
                for each in self.faults
            ),
        )

    @classmethod
    def of(cls, seed: int) -> Plan:
        """The same for the same seed, for ever: kept seeds depend on it."""
        rng = random.Random(seed)
        frontends = tuple(f"front-{i}" for i in range(rng.choice((1, 1, 2))))
        libraries = tuple(f"lib-{i}" for i in range(rng.choice((1, 2, 2, 3))))
        workers = tuple(f"work-{i}" for i in range(rng.choice((1, 1, 2, 3))))
        kinds = [kind for kind in FAULTS if rng.random() < 0.5] if rng.random() < 0.9 else []
        num_tasks, num_faults = rng.randint(3, 20), rng.randint(1, 6) if kinds else 0
        everyone = ("daemon", "daemon", *frontends, *libraries, *workers)
        num_keys = rng.choice((1, 2, 3, 6))
        numbers = iter(range(1, 1000))
        plan = cls(
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
                name: rng.choice((0.02, 0.2)) for name in ("mmap", "connect", "recv_fds", "accept")
            },
        )
        # A few kinds of things at a time meet more often than all of them.
        for_frontends = rng.sample(ASYNC_TASKS, rng.randint(1, 4))
        for_libraries = rng.sample(SYNC_TASKS, rng.randint(1, 5))
        clients = [(name, for_frontends) for name in frontends]
        clients += [(name, for_libraries) for name in libraries]
        # Much happens at the same time, at a few moments.
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
        # Most of what matters happens while something is done.
        faults = [
            replace(fault, at_s=rng.choice(tasks).at_s + rng.choice((2e-3, 2e-2)) * rng.random())
            if rng.random() < 0.8
            else fault
            for fault in faults
        ]
        plan = replace(plan, tasks=tuple(tasks), faults=tuple(faults))
        match seed % 50:
            case 27:
                return _with_tier(plan)
            case 13:
                return _with_torn_messages(plan)
            case 33:
                return _with_an_epoch_after(plan)
            case 43:
                return _with_early_deaths(plan)
            case 45:
                return _with_a_dying_core(_with_engine(plan))
        return _with_engine(plan) if seed % 10 == 5 else plan


def _with_tier(plan: Plan) -> Plan:
    """What talks to a tier besides, and has its part of what goes wrong."""
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


def _with_torn_messages(plan: Plan) -> Plan:
    """Long messages are given up while there is no room for all of them on their way."""
    rng = random.Random(f"torn {plan.seed}")
    return replace(
        plan,
        rules=replace(plan.rules, capacity_nbytes=100),
        # Clocks stay as they are: who has waited for ten seconds has done so.
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


def _with_an_epoch_after(plan: Plan) -> Plan:
    """Programs that have handles of one daemon's, and the next that gives out the same places."""
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
    """Clients die as soon as they have come, while the daemon that lets them in is stopped."""
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
    """The core dies while workers do its step, and what they look at is deleted by others."""
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
    """A core and its workers besides, which have their part of what goes wrong."""
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
