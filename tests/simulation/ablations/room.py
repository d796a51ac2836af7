# ruff: noqa: ARG005 - a replacement has the parameters of the method that it replaces
"""Safeguards of reservations, permits and their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from afferent.admission.earliest import Earliest
from afferent.admission.permits import Semaphores
from afferent.store.backing import Backing
from afferent.store.state.budget import Budget
from afferent.store.state.machine import StoreState
from tests.simulation.ablations.table import Replace, ablation


@ablation("nobody is given what is promised to others")
def _promises(replace: Replace) -> None:
    replace(Budget, "unpromised_nbytes", lambda self, kind: self._capacity[kind] - self._held[kind])
    replace(StoreState, "validate", lambda self: None)


@ablation("what the machine has no memory for is given to nobody")
def _backing(replace: Replace) -> None:
    replace(Backing, "back", lambda self, start, end: self._nbytes)


@ablation("who is next is not passed by what happens to fit")
def _no_passing(replace: Replace) -> None:
    hold = Budget.hold

    def blindly(self: Any, lease: Any, kind: Any, nbytes: int) -> int:
        awaited, self._num_awaited = self._num_awaited, dict.fromkeys(self._num_awaited, 0)
        try:
            return hold(self, lease, kind, nbytes)
        finally:
            self._num_awaited = awaited

    replace(Budget, "hold", blindly)
    replace(Budget, "is_awaited", lambda self, kind: False)


@ablation("of one tenant's equal requests the first comes first")
def _first_come(replace: Replace) -> None:
    put = Earliest.put

    def last_first(self: Any, entry: Any, tag: Any) -> None:
        put(self, entry, tag)
        self._numbers = iter(range(-len(self.heap) - 1, 10**9))

    replace(Earliest, "put", last_first)


@ablation("permits are given back when their request is forgotten")
def _retired_permits(replace: Replace) -> None:
    replace(StoreState, "_retire", lambda self, lease: self.flights.stop_waiting(lease))


@ablation("a free permit goes to who waits for it")
def _settled_permits(replace: Replace) -> None:
    replace(Semaphores, "settle", lambda self, is_running: [])
    replace(StoreState, "validate", lambda self: None)


@ablation("what was freed goes to who waits for room")
def _settled_room(replace: Replace) -> None:
    replace(Budget, "release", unstirred(Budget.release))
    replace(Budget, "drop", unstirred(Budget.drop))
    replace(Budget, "give_back", unstirred(Budget.give_back))


@ablation("a seal gives back the bytes that were not used")
def _trimmed_tails(replace: Replace) -> None:
    def unreleased(self: Any, kind: Any, nbytes: int) -> None:
        if nbytes >= 64 * 2:
            release(self, kind, nbytes)

    release = Budget.release
    replace(Budget, "release", unreleased)


# Tools


def unstirred(call: Callable[..., Any]) -> Callable[..., Any]:
    def quiet(self: Any, *args: Any) -> Any:
        before = self._may_reserve
        found = call(self, *args)
        self._may_reserve = before
        return found

    return quiet
