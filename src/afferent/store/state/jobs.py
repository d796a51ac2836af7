"""The job queue: who makes what, and which makers died of it. Pure.

A job makes one object from others. It is queued once, however many requests want the object, and
handed to one worker; when that worker dies, it is handed to another. A key that has killed two
makers is quarantined for a minute.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from afferent.errors import StoreError
from afferent.store.state.object import NewObject, StoredObject
from afferent.types import ClientId, ContentKey

MAX_CRASHES = 2
CRASH_MEMORY_S = 60.0
JOB_ID_BITS = 40
"""The lower bits of a job's id; above them is the number of the store's epoch."""


@dataclass(slots=True, eq=False)
class Job:
    """``payload`` is for the worker: the store does not look into it.

    ``target`` is missing until the arena has an extent for it; ``worker`` until one has taken it.
    The job's id is the request part of the leases that hold its objects: the store's own, then the
    worker's.
    """

    id: int
    key: ContentKey
    new: NewObject
    inputs: list[StoredObject]
    payload: bytes
    target: StoredObject | None = None
    worker: ClientId | None = None
    taken_s: float = 0.0


class JobQueue:
    """``first_id``: ids are not used again by the store's next life."""

    def __init__(self, *, first_id: int = 1) -> None:
        self._queued: OrderedDict[int, Job] = OrderedDict()  # with a target, without a worker
        self._taken: dict[ClientId, dict[int, Job]] = {}  # by worker
        self._by_id: dict[int, Job] = {}
        self._by_key: dict[ContentKey, Job] = {}
        self._next_id = first_id

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_queued(self) -> int:
        return len(self._by_id) - sum(map(len, self._taken.values()))

    @property
    def num_ready(self) -> int:
        """Jobs that a worker could take."""
        return len(self._queued)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._by_id.values())

    def is_running(self, work: tuple[int, ClientId]) -> bool:
        """Whether the worker that took a job still works on it."""
        job_id, worker = work
        job = self._by_id.get(job_id)
        return job is not None and job.worker == worker

    def find(self, key: ContentKey) -> Job | None:
        return self._by_key.get(key)

    def get(self, job_id: int) -> Job | None:
        return self._by_id.get(job_id)

    def held_by(self, worker: ClientId) -> list[Job]:
        return list(self._taken.get(worker, {}).values())

    def next_id(self) -> int:
        job_id = self._next_id
        self._next_id += 1
        return job_id

    def add(self, job: Job) -> None:
        """A job whose target may have to wait for room."""
        self._by_id[job.id] = job
        self._by_key[job.key] = job
        if job.target is not None:
            self._queued[job.id] = job

    def place(self, job: Job, target: StoredObject) -> None:
        """There is room for the job's object now."""
        job.target = target
        self._queued[job.id] = job

    def overdue(self, *, now_s: float, timeout_s: float) -> list[ClientId]:
        """Workers that have held a job for longer than they may."""
        return [
            worker
            for worker, jobs in self._taken.items()
            if any(now_s - job.taken_s > timeout_s for job in jobs.values())
        ]

    def take(self, worker: ClientId, *, now_s: float) -> Job | None:
        """The oldest job that nobody works on, or ``None``."""
        if not self._queued:
            return None
        _, job = self._queued.popitem(last=False)
        job.worker, job.taken_s = worker, now_s
        self._taken.setdefault(worker, {})[job.id] = job
        return job

    def put_back(self, job: Job) -> None:
        """The worker is gone; the job is the next to be taken."""
        self._untake(job)
        self._queued[job.id] = job
        self._queued.move_to_end(job.id, last=False)

    def remove(self, job: Job) -> None:
        """The job has ended, or nobody waits for it any more."""
        del self._by_id[job.id]
        del self._by_key[job.key]
        self._queued.pop(job.id, None)
        self._untake(job)

    def validate(self) -> None:
        """Check every rule of this class; for tests."""
        jobs = list(self._by_id.values())
        if {job.key: job for job in jobs} != self._by_key or len(self._by_key) < len(jobs):
            raise StoreError("keys lead to the wrong jobs")
        ready = {job.id for job in jobs if job.target is not None and job.worker is None}
        if ready != set(self._queued):
            raise StoreError("the job queue is wrong")
        taken = {(job.worker, job.id) for job in jobs if job.worker is not None}
        if taken != {(worker, number) for worker, them in self._taken.items() for number in them}:
            raise StoreError("the list of jobs by worker is wrong")

    def _untake(self, job: Job) -> None:
        if job.worker is None:
            return
        taken = self._taken[job.worker]
        del taken[job.id]
        if not taken:
            del self._taken[job.worker]
        job.worker = None


class CrashCounts:
    """Keys whose makers died."""

    def __init__(self) -> None:
        # In order of time, so that the death of a maker of thousands does not look at all of them
        # thousands of times.
        self._crashes: OrderedDict[ContentKey, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._crashes)

    def add(self, key: ContentKey, *, now_s: float) -> None:
        """A maker died while it made ``key``."""
        self._forget_old(now_s)
        count, _ = self._crashes.pop(key, (0, now_s))
        self._crashes[key] = (count + 1, now_s)

    def forget(self, key: ContentKey) -> None:
        """``key`` has been made."""
        self._crashes.pop(key, None)

    def is_quarantined(self, key: ContentKey, *, now_s: float) -> bool:
        """Whether ``key`` has killed so many makers lately that nobody should try again."""
        count, at = self._crashes.get(key, (0, now_s))
        return count >= MAX_CRASHES and now_s - at <= CRASH_MEMORY_S

    def _forget_old(self, now_s: float) -> None:
        while self._crashes:
            key = next(iter(self._crashes))
            if now_s - self._crashes[key][1] <= CRASH_MEMORY_S:
                return
            del self._crashes[key]
