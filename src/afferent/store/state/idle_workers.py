"""Workers that wait for a job: preprocessing workers and tier fetchers. Pure."""

from __future__ import annotations

from collections import deque

from afferent.errors import StoreError
from afferent.store.protocol.results import Fetching, Order, Role
from afferent.store.state.jobs import Job, JobQueue
from afferent.store.state.object_table import ObjectTable
from afferent.store.state.waiters import Answer
from afferent.types import ClientId, encode

STORE: ClientId = 0
"""The store's own client id. Its leases hold the objects of jobs that no worker has taken yet."""

_Calls = deque[tuple[ClientId, int]]
"""Workers, each with the seq of its `Take`."""


class IdleWorkers:
    """Queues of idle workers by role; ``answers`` receives the answers to `Take`.

    Invariants:
        - Every entry is a `Take` without an answer, in order of arrival.
    """

    def __init__(self, objects: ObjectTable, jobs: JobQueue, answers: list[Answer]) -> None:
        self._objects, self._jobs, self._answers = objects, jobs, answers
        self._makers: _Calls = deque()
        self._fetchers: _Calls = deque()

    @property
    def can_make(self) -> bool:
        """Whether a preprocessing worker is idle."""
        return bool(self._makers)

    @property
    def can_fetch(self) -> bool:
        """Whether a fetcher is idle."""
        return bool(self._fetchers)

    def add(self, worker: ClientId, seq: int, role: Role) -> None:
        (self._makers if role == "make" else self._fetchers).append((worker, seq))

    def lose(self, client: ClientId) -> None:
        """Remove the calls of a client whose connection has ended."""
        self._makers = deque(entry for entry in self._makers if entry[0] != client)
        self._fetchers = deque(entry for entry in self._fetchers if entry[0] != client)

    def hand_out(self, *, now_s: float) -> list[Job]:
        """Give jobs to the idle workers.

        Returns:
            The jobs that can only be fetched, while no fetcher is idle.
        """
        while self._fetchers:
            job = self._jobs.take_fetch(self._fetchers[0][0], now_s=now_s)
            if job is None:
                break
            fetching = Fetching(job.key, job.new.kind, job.new.nbytes, job.cost_us)
            self._tell(job, *self._fetchers.popleft(), encode(fetching))
        absent = self._jobs.fetch_no_more()
        while self._makers:
            job = self._jobs.take(self._makers[0][0], now_s=now_s, num_idle=len(self._makers))
            if job is None:
                break
            self._tell(job, *self._makers.popleft(), job.payload)
        return absent

    def _tell(self, job: Job, worker: ClientId, seq: int, payload: bytes) -> None:
        if job.target is None:
            raise StoreError("a job without a place was given to a worker")
        self._objects.move_lease((STORE, job.id), (worker, job.id))
        inputs = [source.handle for source in job.inputs]
        order = Order(job.id, job.target.handle, inputs, payload)
        self._answers.append(Answer(worker, seq, order))
