"""What a seed stands for: a small server, what its clients do, and what goes wrong.

Every element has a seed of its own, so that one can be left out and the others stay as they are:
that is how a failing history is made shorter.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from tests.simulator.sockets import LinkRules

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
