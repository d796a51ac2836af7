# ruff: noqa: ARG005 - a replacement has the parameters of the method that it replaces
"""Safeguards of the single flight, of jobs and of the write-behind queue."""

from __future__ import annotations

from typing import Any

from afferent.store.state.jobs import CrashCounts, JobQueue
from afferent.store.state.keeping import KeepQueue
from afferent.store.state.machine import StoreState
from afferent.store.state.object import ObjectState
from afferent.store.state.single_flight import SingleFlight
from tests.simulation.ablations.table import Replace, ablation


@ablation("what somebody is making is not made twice")
def _single_flight(replace: Replace) -> None:
    find = SingleFlight._find

    def takes_over(self: Any, lease: Any, item: Any, now_s: float) -> Any:
        found = self.objects.find(item.key)
        if found is not None and found.state is ObjectState.CREATED and found.writer != lease:
            self.objects._take_key(found)
        return find(self, lease, item, now_s)

    replace(SingleFlight, "_find", takes_over)
    replace(StoreState, "validate", lambda self: None)


@ablation("a key that has killed two makers is refused for a minute")
def _strikes(replace: Replace) -> None:
    replace(CrashCounts, "is_quarantined", lambda self, key, *, now_s: False)


@ablation("a worker that holds a job for too long is killed")
def _overdue_jobs(replace: Replace) -> None:
    replace(JobQueue, "overdue", lambda self, **_: [])


@ablation("who fetches and hangs is killed, sooner than who makes")
def _overdue_fetches(replace: Replace) -> None:
    overdue = JobQueue.overdue

    def of_makers(self: Any, *, now_s: float, timeout_s: float, fetch_timeout_s: float) -> Any:
        return overdue(self, now_s=now_s, timeout_s=timeout_s)

    replace(JobQueue, "overdue", of_makers)


@ablation("what could not be fetched is made")
def _fetches_in_vain(replace: Replace) -> None:
    replace(SingleFlight, "_not_fetched", lambda self, job, worker, *, now_s: None)


@ablation("what is copied to a tier is pinned")
def _kept_pins(replace: Replace) -> None:
    replace(KeepQueue, "_pinned", lambda self, client, request, key: self._objects.find(key))


@ablation("when a maker is gone, another takes over")
def _hand_on(replace: Replace) -> None:
    replace(SingleFlight, "hand_on", lambda self, orphaned, *, now_s: None)


@ablation("a job that nobody waits for is dropped")
def _abandoned_jobs(replace: Replace) -> None:
    replace(SingleFlight, "_drop", lambda self, job: None)


@ablation("what waits for an extent is tried again when something is freed")
def _place_waiting(replace: Replace) -> None:
    replace(SingleFlight, "place_waiting", lambda self, *, now_s: None)


@ablation("a block that waits for an extent is tried again when something is freed")
def _retried_creates(replace: Replace) -> None:
    replace(StoreState, "_retry_creates", lambda self: None)
