"""What the daemon knows and decides: requests in, replies out. No I/O.

This is where objects and jobs meet: a missing object is allocated and its job queued in one step
(single flight: once, whoever else asks), and when it is sealed, every request that waits for it
gets its pin in the same step, so that nothing can be evicted between the two.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec

from afferent.errors import AfferentError, MakerRefused, NotPermitted, StaleHandle, WorkerDied
from afferent.store import messages as m
from afferent.store.allocator import round_up
from afferent.store.jobs import Job, JobQueue
from afferent.store.objects import ClientId, Lease, ObjectState, ObjectTable, StoredObject
from afferent.types import ContentKey, Failure, Handle, Span, encode

Replies = list[tuple[ClientId, m.Reply]]

_STORE: ClientId = 0
"""The store's own leases hold the objects of jobs that no worker has taken yet."""

_LATER = object()
"""The result of a verb that is answered when there is something to say."""

_WORKER_DIED = Failure(
    WorkerDied.code, "the worker process died while it worked on an item of this request; try again"
)


@dataclass(slots=True)
class _PendingWait:
    client: ClientId
    seq: int
    lease: Lease
    keys: list[ContentKey]


class StoreState:
    """One epoch of a store. Clients are numbers from 1; their messages are `messages.Request`."""

    def __init__(self, capacity_nbytes: int, *, segment: int) -> None:
        self.segment = segment
        self.objects = ObjectTable(capacity_nbytes, segment=segment)
        self.jobs = JobQueue()
        self._clients: set[ClientId] = set()
        self._idle: deque[tuple[ClientId, int]] = deque()  # workers and the seq of their `Take`
        self._workers: set[ClientId] = set()
        # What each request waits for; `None` while it is being made.
        self._awaited: dict[Lease, dict[ContentKey, m.Outcome | None]] = {}
        self._waiting_for: dict[ContentKey, set[Lease]] = {}
        self._waits: dict[Lease, list[_PendingWait]] = {}
        self._outbox: Replies = []
        self._counts: Counter[str] = Counter()

    # Events

    def connect(self, client: ClientId) -> None:
        self._clients.add(client)

    def handle(self, client: ClientId, request: m.Request, *, now_s: float) -> Replies:
        """Do what a client asks; the replies that this causes, to it and to others.

        What comes from a client that has been lost is not done: nobody could let go of it.
        """
        if client not in self._clients:
            return []
        try:
            result = self._dispatch(client, request, now_s)
        except AfferentError as error:
            self._reply(client, request.seq, failure=Failure(error.code, error.message))
        else:
            if result is not _LATER:
                self._reply(client, request.seq, result)
        return self._take_outbox()

    def disconnect(self, client: ClientId, *, now_s: float) -> Replies:
        """A connection has ended, but its process may still map the arena.

        Nobody waits for it any more, and nobody can find what it was writing; its pins stay until
        `client_died`.
        """
        self._clients.discard(client)
        self._workers.discard(client)
        self._idle = deque(entry for entry in self._idle if entry[0] != client)
        for job in self.jobs.held_by(client):
            self.jobs.strike(job.key, now_s=now_s)
            self._end_job(job, failure=_WORKER_DIED)
        self.objects.doom_written_by(client)
        for lease in [lease for lease in self._awaited if lease[0] == client]:
            self._stop_waiting(lease)
        return self._take_outbox()

    def client_died(self, client: ClientId, *, now_s: float) -> Replies:
        """A process is gone: nothing of it can read or write any more."""
        replies = self.disconnect(client, now_s=now_s)
        self.objects.drop_client(client)
        return replies

    # Verbs

    def _dispatch(self, client: ClientId, request: m.Request, now_s: float) -> object:
        match request:
            case m.Acquire():
                lease = (client, request.request)
                return [self._acquire(lease, item, now_s) for item in request.items]
            case m.Wait():
                return self._wait(client, request)
            case m.Create():
                return self._create((client, request.request), request.items)
            case m.Seal():
                return self._seal((client, request.request), request.items)
            case m.Abort():
                lease = (client, request.request)
                for item in [self.objects.resolve(handle) for handle in request.handles]:
                    self.objects.abort(lease, item)
                return None
            case m.Get():
                lease = (client, request.request)
                for item in self._resolve_sealed(request.handles):
                    self.objects.pin(lease, item)
                return None
            case m.Release():
                self._release((client, request.request), request.handles)
                return None
            case m.Take():
                self._workers.add(client)
                self._idle.append((client, request.seq))
                self._hand_out_jobs(now_s)
                return _LATER
            case m.Finish():
                self._finish(client, request)
                return None
            case m.Stat():
                return self.statistics()
            case _:
                assert_never(request)

    def _acquire(self, lease: Lease, item: m.AcquireItem, now_s: float) -> m.Outcome:
        key = ContentKey(item.key)
        found = self.objects.find(key)
        if found is not None and found.state is ObjectState.SEALED:
            self.objects.pin(lease, found)
            self._counts["hits"] += 1
            return m.Outcome("hit", found.handle)
        if found is not None:
            self._await(lease, key)
            self._counts["joined"] += 1
            return m.Outcome("busy")
        if item.job is None:
            return m.Outcome("absent")
        try:
            self._queue_job(item, item.job, now_s)
        except AfferentError as error:
            return m.Outcome("failed", failure=Failure(error.code, error.message))
        self._await(lease, key)
        self._hand_out_jobs(now_s)
        self._counts["misses"] += 1
        return m.Outcome("miss")

    def _queue_job(self, item: m.AcquireItem, spec: m.JobSpec, now_s: float) -> None:
        key = ContentKey(item.key)
        if self.jobs.refused(key, now_s=now_s):
            raise MakerRefused("this item killed the workers that processed it; refused for now")
        inputs = self._resolve_sealed(spec.inputs)
        job_id = self.jobs.next_id()
        lease = (_STORE, f"job-{job_id}")
        # The inputs are pinned first: making room must not evict them.
        for source in inputs:
            self.objects.pin(lease, source)
        try:
            target = self.objects.create(lease, kind=item.kind, nbytes=item.nbytes, key=key)
        except AfferentError:
            self.objects.drop_lease(lease)
            raise
        self.jobs.add(Job(job_id, key, target, inputs, spec.payload))

    def _wait(self, client: ClientId, request: m.Wait) -> object:
        lease = (client, request.request)
        awaited = self._awaited.get(lease, {})
        keys = [ContentKey(key) for key in request.keys]
        if any(key not in awaited for key in keys):
            raise NotPermitted("a request waits for what it has acquired and did not get")
        self._waits.setdefault(lease, []).append(_PendingWait(client, request.seq, lease, keys))
        self._answer_waits(lease)
        return _LATER

    def _create(self, lease: Lease, items: list[m.CreateItem]) -> list[Handle]:
        created: list[StoredObject] = []
        try:
            for item in items:
                key = ContentKey(item.key) if item.key is not None else None
                created.append(
                    self.objects.create(lease, kind=item.kind, nbytes=item.nbytes, key=key)
                )
        except AfferentError:
            for done in created:
                self.objects.abort(lease, done)
            raise
        return [item.handle for item in created]

    def _seal(self, lease: Lease, items: list[m.SealItem]) -> list[Handle]:
        handles = []
        for item in items:
            sealed = self.objects.resolve(item.handle)
            self.objects.seal(lease, sealed, used_nbytes=item.used_nbytes)
            handles.append(sealed.handle)
            if sealed.key is not None:
                self._resolve_awaited(sealed.key, sealed, failure=None, spans=())
        return handles

    def _release(self, lease: Lease, handles: list[Handle] | None) -> None:
        if handles is None:
            self._stop_waiting(lease)
            self.objects.drop_lease(lease)
            return
        for item in [self.objects.resolve(handle) for handle in handles]:
            self.objects.unpin(lease, item)

    def _finish(self, client: ClientId, request: m.Finish) -> None:
        job = self.jobs.get(request.job)
        if job is None or job.worker != client:
            raise NotPermitted("this worker does not hold the job")
        lease = (client, job.lease_name)
        if request.failure is None:
            self.objects.seal(lease, job.target, used_nbytes=request.used_nbytes)
        self._end_job(job, failure=request.failure, spans=request.spans)
        self.objects.drop_lease(lease)

    def statistics(self) -> m.Statistics:
        by_kind: Counter[str] = Counter()
        for item in self.objects:
            by_kind[item.kind.value] += round_up(item.handle.nbytes)
        return m.Statistics(
            capacity_nbytes=self.objects.capacity_nbytes,
            used_nbytes=self.objects.used_nbytes,
            pinned_nbytes=self.objects.pinned_nbytes,
            largest_free_nbytes=self.objects.largest_free_nbytes,
            num_objects=len(self.objects),
            nbytes_by_kind=dict(by_kind),
            num_jobs_queued=self.jobs.num_queued,
            num_jobs_running=len(self.jobs) - self.jobs.num_queued,
            num_workers=len(self._workers),
            num_clients=len(self._clients),
            num_hits=self._counts["hits"],
            num_misses=self._counts["misses"],
            num_joined=self._counts["joined"],
            num_evicted=self.objects.num_evicted,
        )

    # Inner steps

    def _resolve_sealed(self, handles: Sequence[Handle]) -> list[StoredObject]:
        found = [self.objects.resolve(handle) for handle in handles]
        if any(item.state is not ObjectState.SEALED for item in found):
            raise StaleHandle("the object behind a handle is not sealed")
        return found

    def _await(self, lease: Lease, key: ContentKey) -> None:
        self._awaited.setdefault(lease, {})[key] = None
        self._waiting_for.setdefault(key, set()).add(lease)

    def _hand_out_jobs(self, now_s: float) -> None:
        while self._idle and self.jobs.num_queued:
            worker, seq = self._idle.popleft()
            job = self.jobs.take(worker, now_s=now_s)
            if job is None:
                return
            lease = (worker, job.lease_name)
            for source in job.inputs:
                self.objects.pin(lease, source)
            self.objects.hand_over(job.target, lease)
            self.objects.drop_lease((_STORE, job.lease_name))
            inputs = [source.handle for source in job.inputs]
            self._reply(worker, seq, m.Order(job.id, job.target.handle, inputs, job.payload))

    def _end_job(self, job: Job, *, failure: Failure | None, spans: Sequence[Span] = ()) -> None:
        """Tell everybody who waits for the job's object what became of it."""
        self.jobs.remove(job)
        self._resolve_awaited(job.key, job.target, failure=failure, spans=spans)

    def _resolve_awaited(
        self,
        key: ContentKey,
        item: StoredObject,
        *,
        failure: Failure | None,
        spans: Sequence[Span],
    ) -> None:
        for lease in self._waiting_for.pop(key, ()):
            if failure is None:
                self.objects.pin(lease, item)
                outcome = m.Outcome("made", item.handle, spans=list(spans))
            else:
                outcome = m.Outcome("failed", failure=failure, spans=list(spans))
            self._awaited[lease][key] = outcome
            self._answer_waits(lease)

    def _answer_waits(self, lease: Lease) -> None:
        """Answer each `Wait` of this request whose keys have all been resolved."""
        outcomes = self._awaited.get(lease, {})
        still = []
        for wait in self._waits.get(lease, ()):
            found = [outcomes[key] for key in wait.keys]
            if any(outcome is None for outcome in found):
                still.append(wait)
            else:
                self._reply(wait.client, wait.seq, found)
        if still:
            self._waits[lease] = still
        else:
            self._waits.pop(lease, None)

    def _stop_waiting(self, lease: Lease) -> None:
        """The request has gone; a queued job that nobody else waits for is dropped."""
        self._waits.pop(lease, None)
        for key, outcome in self._awaited.pop(lease, {}).items():
            if outcome is not None:
                continue
            waiting = self._waiting_for[key]
            waiting.discard(lease)
            if waiting:
                continue
            del self._waiting_for[key]
            job = self.jobs.find(key)
            if job is not None and job.worker is None:
                self.jobs.remove(job)
                self.objects.drop_lease((_STORE, job.lease_name))

    def _reply(
        self, client: ClientId, seq: int, result: object = None, *, failure: Failure | None = None
    ) -> None:
        self._outbox.append((client, m.Reply(seq, msgspec.Raw(encode(result)), failure)))

    def _take_outbox(self) -> Replies:
        outbox, self._outbox = self._outbox, []
        return outbox
