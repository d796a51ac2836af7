"""Plans: a small server, the tasks of its clients, and the faults, all drawn from a seed.

Every element has a seed of its own, so that one can be left out without changing the others: that
is how a failing history is made shorter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from tests.simulator.sockets import LinkRules

TROUBLE_S: Final = 2.0
"""No faults are injected after this time, and every request has to end."""

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
    """At ``at_s``, ``client`` begins to do ``what``."""

    number: int
    client: str
    at_s: float
    what: str
    seed: int


@dataclass(frozen=True, slots=True)
class Fault:
    """At ``at_s``, the fault ``what`` strikes ``target``, for ``length_s``."""

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
    """The key that kills each process that makes it; -1 for none."""
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
    """The engine workers; without any there is no engine."""
    has_vllm: bool = False
    """Whether there is a vLLM, as an engine core and a worker."""
    tiers: tuple[str, ...] = ()
    """The processes that fetch from a tier and write to it; without them there is no tier."""
    tasks: tuple[Task, ...] = ()
    faults: tuple[Fault, ...] = ()
    failure_rates: dict[str, float] = field(default_factory=dict)

    @property
    def elements(self) -> list[int]:
        """Return the numbers of the tasks and faults, each of which can be left out."""
        return [each.number for each in (*self.tasks, *self.faults)]

    def without(self, dropped: frozenset[int]) -> Plan:
        """Replace these elements by empty ones at the same times: the others stay the same."""
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
