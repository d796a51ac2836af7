"""Job queue, and the count of worker crashes by key. Pure.

A job produces one object from others. It is queued once, however many requests need the object, and
given to one worker. When that worker dies, another gets the job. A key is quarantined for a minute
when one job, or jobs within a minute, have killed two workers.

The queue is fair between tenants and requests, by the duration of jobs. Long jobs can't be
interrupted. So while short jobs arrive, one of several workers takes only short jobs.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from afferent.admission.shares import FairQueue, Share
from afferent.errors import StoreError
from afferent.store.state.object import NewObject, StoredObject
from afferent.types import ClientId, ContentKey, Lease, Span

MAX_CRASHES = 2
CRASH_MEMORY_S = 60.0
JOB_ID_BITS = 40
"""The lower bits of a job's id; the upper bits are the number of the store's epoch."""

_LONG_US = 250_000
_MEMORY_OF_SHORT_S = 10.0


@dataclass(slots=True, eq=False)
class Job:
    """Production of one object; ``payload`` is for the worker and opaque to the store.

    ``target`` is ``None`` until the arena has an extent for it, and ``worker`` until a worker has
    taken the job. The job's id is the request part of the leases that hold its objects: first the
    store's own lease, then the worker's. ``lease`` is the first request that needed the object, and
    ``share`` the share of its tenant.
    """

    id: int
    key: ContentKey
    new: NewObject
    inputs: list[StoredObject]
    payload: bytes
    lease: Lease
    share: Share
    cost_us: int
    can_be_made: bool
    target: StoredObject | None = None
    worker: ClientId | None = None
    taken_s: float = 0.0
    renewed_s: float = 0.0
    """When the timeout of its worker began."""
    num_deaths: int = 0
    """Workers that died while they had it."""
    is_fetch: bool = False
    """Whether it is for a fetcher; if the fetch fails, a preprocessing worker gets it."""
    spans: list[Span] = field(default_factory=list)
    """Spans of a failed fetch."""

    @property
    def is_long(self) -> bool:
        return self.cost_us > _LONG_US


class JobQueue:
    """All jobs; ``first_id`` is above the ids of the store's earlier epochs.

    Invariants:
        - Each job is found by its id and by its key, and no two jobs have the same key.
        - A job with a target and without a worker is in exactly one of the four queues.
        - ``_taken`` lists exactly the jobs with a worker.
    """

    def __init__(self, *, first_id: int = 1) -> None:
        # With a target and without a worker: first jobs of dead workers, then the others.
        self._returned: deque[Job] = deque()
        self._short: FairQueue[Job] = FairQueue()
        self._long: FairQueue[Job] = FairQueue()
        self._fetches: deque[Job] = deque()
        self._short_ahead_us = 0  # short jobs' work less long jobs' work, while both wait
        self._last_short_s = float("-inf")
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
        """Number of jobs for the next idle worker; long jobs may have to wait and do not count."""
        return len(self._returned) + len(self._short)

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
        """Add a job; without a target, it waits for `place`."""
        self._by_id[job.id] = job
        self._by_key[job.key] = job
        if job.target is not None:
            self._queue(job)

    def place(self, job: Job, target: StoredObject) -> None:
        """Set the target of a job, once there is space, and queue the job."""
        job.target = target
        self._queue(job)

    def overdue(
        self, *, now_s: float, timeout_s: float, fetch_timeout_s: float = float("inf")
    ) -> list[ClientId]:
        """Return the workers that exceed the timeout of a job."""
        return [
            worker
            for worker, jobs in self._taken.items()
            if any(
                now_s - job.renewed_s > (fetch_timeout_s if job.is_fetch else timeout_s)
                for job in jobs.values()
            )
        ]

    def next_overdue_s(self, *, timeout_s: float, fetch_timeout_s: float) -> float:
        """Return when the first worker will exceed the timeout of a job."""
        return min(
            (
                job.renewed_s + (fetch_timeout_s if job.is_fetch else timeout_s)
                for jobs in self._taken.values()
                for job in jobs.values()
            ),
            default=float("inf"),
        )

    def renew(self, worker: ClientId, job_id: int, *, now_s: float) -> None:
        """Restart the timeout of a fetch, if this worker has the job."""
        job = self._by_id.get(job_id)
        if job is not None and job.worker == worker and job.is_fetch:
            job.renewed_s = now_s

    def take_fetch(self, worker: ClientId, *, now_s: float) -> Job | None:
        """Take the next job for a fetcher."""
        job = self._fetches.popleft() if self._fetches else None
        if job is not None:
            self._give(job, worker, now_s=now_s)
        return job

    def fetch_no_more(self) -> list[Job]:
        """Queue all waiting fetches for workers, if possible; return those that can't be made."""
        waiting, self._fetches = self._fetches, deque()
        for job in waiting:
            self.make_instead(job)
        return [job for job in waiting if not job.can_be_made]

    def make_instead(self, job: Job) -> None:
        """Queue a job that was not fetched for workers, if it can be made; else see `remove`."""
        self._untake(job)
        job.is_fetch = False
        if job.can_be_made:
            self._queue(job)

    def take(self, worker: ClientId, *, now_s: float, num_idle: int) -> Job | None:
        """Take the next job, or ``None`` if there is none that may begin now.

        Args:
            num_idle: Number of idle workers, including this one.
        """
        job = self._next(now_s, num_idle)
        if job is None:
            return None
        self._give(job, worker, now_s=now_s)
        return job

    def charge(self, job: Job, *, now_s: float) -> None:
        """Charge the tenant for the time that a job took; its estimate was charged at its start."""
        took_us = (now_s - job.taken_s) * 1e6
        estimate_us = 0 if job.num_deaths else job.cost_us
        self._class_of(job).charge(job.share, took_us - estimate_us)

    def worker_died(self, job: Job, *, now_s: float) -> None:
        """Charge the time and count the death; `put_back` or `remove` the job afterwards."""
        self.charge(job, now_s=now_s)
        job.num_deaths += 1

    def put_back(self, job: Job) -> None:
        """Put a job of a dead worker at the front of the queue."""
        self._untake(job)
        self._returned.appendleft(job)

    def remove(self, job: Job) -> None:
        """Remove a job that has ended or that no request waits for."""
        del self._by_id[job.id]
        del self._by_key[job.key]
        if not self._class_of(job).discard(job):
            for jobs in (self._returned, self._fetches):
                if job in jobs:
                    jobs.remove(job)
        self._untake(job)

    def validate(self) -> None:
        """Check every invariant; for tests."""
        jobs = list(self._by_id.values())
        if {job.key: job for job in jobs} != self._by_key or len(self._by_key) < len(jobs):
            raise StoreError("keys lead to the wrong jobs")
        ready = {job.id for job in jobs if job.target is not None and job.worker is None}
        if any(not job.is_fetch for job in self._fetches):
            raise StoreError("a job that is to be made waits for who fetches")
        self._short.validate()
        self._long.validate()
        queues = (self._returned, self._short, self._long, self._fetches)
        queued = [job.id for jobs in queues for job in jobs]
        if ready != set(queued) or len(ready) < len(queued):
            raise StoreError("the job queue is wrong")
        taken = {(job.worker, job.id) for job in jobs if job.worker is not None}
        if taken != {(worker, number) for worker, them in self._taken.items() for number in them}:
            raise StoreError("the list of jobs by worker is wrong")

    def _class_of(self, job: Job) -> FairQueue[Job]:
        return self._long if job.is_long else self._short

    def _give(self, job: Job, worker: ClientId, *, now_s: float) -> None:
        job.worker, job.taken_s, job.renewed_s = worker, now_s, now_s
        self._taken.setdefault(worker, {})[job.id] = job

    def _queue(self, job: Job) -> None:
        if job.is_fetch:
            self._fetches.append(job)
            return
        self._class_of(job).push(job, share=job.share, flow=job.lease, cost=job.cost_us)

    def _next(self, now_s: float, num_idle: int) -> Job | None:
        if self._returned:
            return self._returned.popleft()
        if not self._long or not self._short:
            self._short_ahead_us = 0
        is_long_ones_turn = self._long and (not self._short or self._short_ahead_us > 0)
        if is_long_ones_turn and self._may_begin_long(now_s, num_idle):
            job = self._long.pop()
        else:
            job = self._short.pop()
        if job is not None and job.is_long:
            self._short_ahead_us -= job.cost_us
        elif job is not None:
            self._short_ahead_us += job.cost_us
            self._last_short_s = now_s
        return job

    def _may_begin_long(self, now_s: float, num_idle: int) -> bool:
        """Whether a worker is left for short jobs; without recent short jobs, none is kept free."""
        taken = (job for jobs in self._taken.values() for job in jobs.values())
        running = [job for job in taken if not job.is_fetch]
        num_workers = num_idle + len({job.worker for job in running})
        if num_workers == 1 or now_s - self._last_short_s > _MEMORY_OF_SHORT_S:
            return True
        return sum(job.is_long for job in running) + 1 < num_workers

    def _untake(self, job: Job) -> None:
        if job.worker is None:
            return
        taken = self._taken[job.worker]
        del taken[job.id]
        if not taken:
            del self._taken[job.worker]
        job.worker = None


class CrashCounts:
    """Crash counts of keys whose workers died.

    Invariants:
        - Entries are in order of their last crash.
    """

    def __init__(self) -> None:
        # In order of time: when a worker with thousands of jobs dies, each `add` looks only at
        # expired entries.
        self._crashes: OrderedDict[ContentKey, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._crashes)

    def add(self, key: ContentKey, *, now_s: float, num_known: int = 1) -> None:
        """Count the death of a worker that worked on ``key``.

        Args:
            num_known: Known deaths, this one included: a job may take longer than they are kept.
        """
        self._forget_old(now_s)
        count, _ = self._crashes.pop(key, (0, now_s))
        self._crashes[key] = (max(count + 1, num_known), now_s)

    def forget(self, key: ContentKey) -> None:
        """Reset the count of ``key`` after it was made."""
        self._crashes.pop(key, None)

    def is_quarantined(self, key: ContentKey, *, now_s: float) -> bool:
        """Whether ``key`` has killed too many workers recently."""
        count, at = self._crashes.get(key, (0, now_s))
        return count >= MAX_CRASHES and now_s - at <= CRASH_MEMORY_S

    def _forget_old(self, now_s: float) -> None:
        while self._crashes:
            key = next(iter(self._crashes))
            if now_s - self._crashes[key][1] <= CRASH_MEMORY_S:
                return
            del self._crashes[key]
