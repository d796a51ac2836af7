"""The job queue: who makes what, and which makers died of it. Pure.

A job makes one object from others. It is queued once, however many requests want the object; it is
handed to one worker; when that worker dies, the job has failed, and its key has a strike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from afferent.store.objects import ClientId, StoredObject
from afferent.types import ContentKey

MAX_STRIKES = 2
STRIKE_MEMORY_S = 60.0


@dataclass(slots=True, eq=False)
class Job:
    """``payload`` is for the worker: the store does not look into it."""

    id: int
    key: ContentKey
    target: StoredObject
    inputs: list[StoredObject]
    payload: bytes
    worker: ClientId | None = None
    taken_s: float = 0.0

    @property
    def lease_name(self) -> str:
        """The request part of the lease under which the job's worker holds its objects."""
        return f"job-{self.id}"


class JobQueue:
    def __init__(self) -> None:
        self._queued: deque[Job] = deque()
        self._by_id: dict[int, Job] = {}
        self._by_key: dict[ContentKey, Job] = {}
        self._strikes: dict[ContentKey, tuple[int, float]] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    def find(self, key: ContentKey) -> Job | None:
        return self._by_key.get(key)

    def get(self, job_id: int) -> Job | None:
        return self._by_id.get(job_id)

    def held_by(self, worker: ClientId) -> Iterator[Job]:
        return iter([job for job in self._by_id.values() if job.worker == worker])

    def next_id(self) -> int:
        job_id = self._next_id
        self._next_id += 1
        return job_id

    def add(self, job: Job) -> None:
        self._by_id[job.id] = job
        self._by_key[job.key] = job
        self._queued.append(job)

    def overdue(self, *, now_s: float, timeout_s: float) -> list[ClientId]:
        """Workers that have held a job for longer than they may."""
        return [
            job.worker
            for job in self._by_id.values()
            if job.worker is not None and now_s - job.taken_s > timeout_s
        ]

    def take(self, worker: ClientId, *, now_s: float) -> Job | None:
        """The oldest job that nobody works on, or ``None``."""
        if not self._queued:
            return None
        job = self._queued.popleft()
        job.worker, job.taken_s = worker, now_s
        return job

    def remove(self, job: Job) -> None:
        """The job has ended, or nobody waits for it any more."""
        del self._by_id[job.id]
        del self._by_key[job.key]
        if job.worker is None:
            self._queued.remove(job)

    def strike(self, key: ContentKey, *, now_s: float) -> None:
        """A worker died while it made ``key``."""
        count, since = self._strikes.get(key, (0, now_s))
        if now_s - since > STRIKE_MEMORY_S:
            count = 0
        self._strikes[key] = (count + 1, now_s)
        for old in [k for k, (_, at) in self._strikes.items() if now_s - at > STRIKE_MEMORY_S]:
            del self._strikes[old]

    def refused(self, key: ContentKey, *, now_s: float) -> bool:
        """Whether ``key`` has killed so many workers lately that nobody should try again."""
        count, at = self._strikes.get(key, (0, now_s))
        return count >= MAX_STRIKES and now_s - at <= STRIKE_MEMORY_S
