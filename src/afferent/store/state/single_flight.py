"""Single flight: a missing object is produced once, however many requests need it. Pure.

A worker that takes the job produces it, or a request that creates and seals it itself; all other
requests wait. When a producer dies, another takes over. A key that has killed two producers is
quarantined for a minute, so that one image that crashes a decoder can't kill the workers again and
again. A job that no request waits for is dropped.

If a tier process is connected and idle, it gets a job first: another machine may have produced the
missing object. No job ever queues for the tier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from afferent.admission.shares import NAMELESS, Share
from afferent.errors import (
    AfferentError,
    NotPermitted,
    Quarantined,
    StoreError,
    StoreRestarted,
    WorkerDied,
)
from afferent.store.protocol import requests
from afferent.store.protocol.items import Claim, Fetch, Find, Join, Queue, Wanted
from afferent.store.protocol.results import (
    Absent,
    Failed,
    Hit,
    InFlight,
    Made,
    Outcome,
    Owner,
    Role,
    Scheduled,
)
from afferent.store.state.allocator import round_up
from afferent.store.state.idle_workers import STORE, IdleWorkers
from afferent.store.state.jobs import JOB_ID_BITS, CrashCounts, Job, JobQueue
from afferent.store.state.keeping import TIERED, KeepQueue
from afferent.store.state.key_state import KeyState
from afferent.store.state.object import NewObject, ObjectState, StoredObject
from afferent.store.state.object_table import ObjectTable
from afferent.store.state.waiters import Answer, Waiters
from afferent.types import ClientId, ContentKey, Failure, Lease, Span

_WORKER_DIED = Failure(
    WorkerDied.code, "the process that worked on an item of this request died; try again"
)
_QUARANTINED = Failure(
    Quarantined.code, "this item killed the processes that worked on it; refused for now"
)


class SingleFlight:
    """Objects, jobs and waiting requests; `take_answers` returns the answers to `Wait` and `Take`.

    Invariants:
        - No worker is idle while a job is ready for it.
        - A job without a target is in ``_unplaced``, and a request waits for its key.
        - A job's key leads to its target, whose writer is the job's worker, or the store.
    """

    def __init__(
        self,
        objects: ObjectTable,
        share_of: Callable[[Lease], Share] = lambda _: NAMELESS,
        failure_of: Callable[[AfferentError], Failure] = Failure.of,
    ) -> None:
        """Create it without jobs.

        Args:
            share_of: Returns the tenant share of a request.
            failure_of: Converts an error for sending.
        """
        self.objects, self._share_of, self._failure_of = objects, share_of, failure_of
        self.jobs = JobQueue(first_id=objects.segment << JOB_ID_BITS)
        self._answers: list[Answer] = []
        self.waiters = Waiters(self._answers)
        self.num_hits = self.num_misses = self.num_joined = 0
        self.num_jobs_made = self.num_jobs_failed = self.num_jobs_fetched = 0
        self.keeping = KeepQueue(objects, self._answers)
        self._crashes = CrashCounts()
        self.idle = IdleWorkers(objects, self.jobs, self._answers)
        # Jobs, and keys to hand on, that have bytes and wait for a long enough extent.
        self._unplaced: deque[Job | ContentKey] = deque()

    def take_answers(self) -> list[Answer]:
        """Return the answers since the last call."""
        answers = list(self._answers)
        self._answers.clear()
        return answers

    # Requests

    def acquire(self, lease: Lease, items: Sequence[Wanted], *, now_s: float) -> list[Outcome]:
        """Pin existing objects, join the production of others, and start that of missing ones."""
        # Existing objects are pinned first: space for the others must not evict them.
        outcomes: list[Outcome | None] = [None] * len(items)
        if not self._are_unknown(items):
            outcomes = [self._find(lease, item, now_s) for item in items]
        if None not in outcomes:
            return [outcome for outcome in outcomes if outcome is not None]
        missing = [item for item, found in zip(items, outcomes, strict=True) if found is None]
        claimed = self._claim_all(lease, [item for item in missing if isinstance(item, Claim)])
        # A key that occurs twice is made once and then found.
        made = [
            outcome
            or claimed.pop(item.key, None)
            or self._find(lease, item, now_s)
            or self._have_made(lease, item)
            for item, outcome in zip(items, outcomes, strict=True)
        ]
        self._hand_out_jobs(now_s)
        return made

    def running_for(self, lease: Lease) -> list[tuple[int, ClientId]]:
        """Return the jobs that run for this request alone, each with its worker."""
        found = (self.jobs.find(key) for key in self.waiters.awaited_alone(lease))
        return [(job.id, job.worker) for job in found if job is not None and job.worker is not None]

    def stop_waiting(self, lease: Lease) -> None:
        """End a request. A job that only it waits for is dropped if no worker has it.

        A running job is finished: a later request finds its object.
        """
        for key in self.waiters.stop(lease):
            job = self.jobs.find(key)
            if job is not None and job.worker is None:
                self._drop(job)

    def state_of(self, key: ContentKey, *, now_s: float) -> KeyState:
        """Return the state of a key."""
        return self._state_of(key, self.objects.find(key), now_s)

    def _state_of(self, key: ContentKey, found: StoredObject | None, now_s: float) -> KeyState:
        if found is not None and found.state is ObjectState.SEALED:
            return KeyState.SEALED
        job = self.jobs.find(key)
        if job is not None:
            if job.target is None:
                return KeyState.UNPLACED
            if job.worker is None:
                return KeyState.QUEUED
            return KeyState.FETCHING if job.is_fetch else KeyState.MAKING
        if found is not None:
            return KeyState.OWNED
        if self.waiters.is_awaited(key):
            return KeyState.ORPHANED
        if self._crashes and self._crashes.is_quarantined(key, now_s=now_s):
            return KeyState.QUARANTINED
        return KeyState.ABSENT

    # Jobs

    def worker_idle(self, worker: ClientId, seq: int, *, now_s: float, role: Role = "make") -> None:
        """Note that a worker waits for a job."""
        if role == "keep":
            self.keeping.keeper_idle(worker, seq)
            return
        self.idle.add(worker, seq, role)
        self._hand_out_jobs(now_s)

    def finish(self, worker: ClientId, request: requests.Finish, *, now_s: float) -> None:
        """End a job.

        Raises:
            NotPermitted: The worker does not have this job.
            StoreRestarted: The job is from an earlier epoch of the store.
        """
        if request.job >> JOB_ID_BITS != self.objects.segment:
            raise StoreRestarted("the job was lost with a former life of the store")
        job = self.jobs.get(request.job)
        if job is None or job.worker != worker or job.target is None:
            raise NotPermitted("this worker does not hold the job")
        spans = [*job.spans, *request.spans]
        if job.is_fetch and request.failure is not None:
            job.spans = spans
            self._not_fetched(job, worker, now_s=now_s)
            return
        lease = (worker, job.id)
        if request.failure is None:
            job.target.tenant = job.share.tenant
            self.objects.seal(lease, job.target, used_nbytes=request.used_nbytes)
            self._tell_sealed(job.target, spans)
        else:
            self.failed(job.key, request.failure, spans)
        self._count(job, request.failure, now_s)
        self.jobs.remove(job)
        self.objects.drop_lease(lease)

    def sealed(
        self,
        item: StoredObject,
        *,
        lease: Lease,
        sources: Iterable[StoredObject] = (),
        made_us: int,
    ) -> None:
        """Report an object made by a request; by default it belongs to its source's tenant."""
        owners = [source.tenant for source in sources]
        item.tenant = self._share_of(lease).tenant or next(iter(owners), "")
        self._tell_sealed(item, ())
        if made_us or item.kind in TIERED:
            self.keeping.add(item, cost_us=0, made_us=made_us)

    def _count(self, job: Job, failure: Failure | None, now_s: float) -> None:
        if job.is_fetch:
            self.num_jobs_fetched += 1
            return
        self.jobs.charge(job, now_s=now_s)
        if failure is not None:
            self.num_jobs_failed += 1
            return
        self.num_jobs_made += 1
        if job.target is not None and job.new.kind in TIERED:
            made_us = round((now_s - job.taken_s) * 1e6)
            self.keeping.add(job.target, cost_us=job.cost_us, made_us=made_us)

    def _tell_sealed(self, item: StoredObject, spans: Sequence[Span]) -> None:
        """Pin an object for all requests that wait for it, and notify them."""

        def made(lease: Lease) -> Made:
            self.objects.pin(lease, item)  # can't fail: its writer has it pinned
            return Made(item.handle, list(spans))

        if item.key is not None:
            self._crashes.forget(item.key)
            if self.waiters.is_awaited(item.key):
                self.waiters.resolve(item.key, made)

    def failed(self, key: ContentKey, failure: Failure, spans: Sequence[Span] = ()) -> None:
        """Report that a key can't be made: all requests that wait for it fail."""
        outcome = Failed(failure, list(spans))
        self.waiters.resolve(key, lambda _: outcome)

    # Disconnects and crashes

    def client_lost(self, client: ClientId, *, now_s: float) -> None:
        """Handle the end of a connection: objects that its requests write lose their keys.

        Its jobs are handed on at its death: until then it could still write into their objects.
        """
        self.idle.lose(client)
        self.keeping.client_lost(client)
        targets = {id(job.target) for job in self.jobs.held_by(client)}
        for item in self.objects.written_by(client):
            if id(item) in targets or item.state is not ObjectState.CREATED:
                continue
            if item.key is not None:
                self._crashes.add(item.key, now_s=now_s)
            self.objects.delete(item)
        for lease in self.waiters.leases_of(client):
            self.stop_waiting(lease)

    def maker_died(self, worker: ClientId, *, now_s: float) -> None:
        """Hand on the jobs of a dead worker."""
        for job in self.jobs.held_by(worker):
            if job.is_fetch:  # not the fault of the item
                self._not_fetched(job, worker, now_s=now_s)
                continue
            self.jobs.worker_died(job, now_s=now_s)
            self._crashes.add(job.key, now_s=now_s, num_known=job.num_deaths)
            if self._crashes.is_quarantined(job.key, now_s=now_s):
                self.failed(job.key, _WORKER_DIED)
            if self.waiters.is_awaited(job.key):
                self.objects.move_lease((worker, job.id), (STORE, job.id))
                self.jobs.put_back(job)
            else:
                self.jobs.remove(job)
        self._hand_out_jobs(now_s)

    def hand_on(self, orphaned: Iterable[ContentKey], *, now_s: float) -> None:
        """Find new producers for objects whose writers have aborted or are gone."""
        for key in orphaned if self.waiters else ():
            self._hand_on(key, now_s=now_s)

    def place_waiting(self, *, now_s: float) -> None:
        """Retry the jobs and keys that wait for an extent, after blocks were freed."""
        waiting, self._unplaced = self._unplaced, deque()
        for entry in waiting:
            if not isinstance(entry, Job):
                self._hand_on(entry, now_s=now_s)
            elif self.jobs.get(entry.id) is entry:
                target = self.objects.create((STORE, entry.id), entry.new)
                if target is None:
                    self._unplaced.append(entry)
                else:
                    self.jobs.place(entry, target)
        self._hand_out_jobs(now_s)

    def unplaced_keys(self) -> list[ContentKey]:
        """Return the keys that have bytes and wait for an extent."""
        return [entry.key if isinstance(entry, Job) else entry for entry in self._unplaced]

    def validate(self) -> None:
        """Check every invariant; for tests."""
        self.waiters.validate()
        self.jobs.validate()
        if self.idle.can_make and self.jobs.num_ready:
            raise StoreError("a worker is idle while a job waits for one")
        unplaced = {id(entry) for entry in self._unplaced}
        for job in self.jobs:
            target = job.target
            if target is None:
                if id(job) not in unplaced or not self.waiters.is_awaited(job.key):
                    raise StoreError("a job without a place does not wait for one")
                continue
            if self.objects.find(job.key) is not target:
                raise StoreError("a job makes what nobody can find")
            if target.writer != (job.worker or STORE, job.id):
                raise StoreError("a job's object belongs to somebody else")

    # Inner steps

    def _are_unknown(self, items: Sequence[Wanted]) -> bool:
        """Whether `_find` would find none of these; common for a request with new media."""
        return (
            not self.waiters
            and not self._crashes
            and not any(isinstance(item, Join) for item in items)
            and self.objects.has_none_of([item.key for item in items])
        )

    def _find(self, lease: Lease, item: Wanted, now_s: float) -> Outcome | None:
        """Return an item's outcome if nothing has to be made; ``None`` if it has to be made."""
        key = ContentKey(item.key)
        if self.waiters:
            untold = self.waiters.untold(lease, key, finds=isinstance(item, Find))
            if untold is not None:
                return untold
        found = self.objects.find(key)
        match self._state_of(key, found, now_s):
            case KeyState.SEALED if found is not None:
                try:
                    self.objects.pin(lease, found)
                except AfferentError as error:
                    return self._failed(error)
                self.num_hits += 1
                return Hit(found.handle)
            case _ if isinstance(item, Find):
                return Absent()
            case KeyState.OWNED if found is not None and found.writer == lease:
                return Owner(found.handle)  # repeats its first outcome
            case KeyState.ABSENT:
                return Absent() if isinstance(item, Join) else None
            case KeyState.QUARANTINED:
                return Absent() if isinstance(item, Join) else Failed(_QUARANTINED)
        would_make = _new(item) if isinstance(item, Claim) else None
        self.waiters.join(lease, key, would_make=would_make)
        self.num_joined += 1
        return InFlight()

    def _claim_all(self, lease: Lease, items: Sequence[Claim]) -> dict[bytes, Outcome]:
        """Let a request make these objects itself, as far as there is space."""
        news = {item.key: _new(item) for item in items}
        self.num_misses += len(news)
        try:
            created = self.objects.create_all(lease, list(news.values()))
        except AfferentError:
            created = None
        if created is None:
            return {key: self._claim(lease, ContentKey(key), new) for key, new in news.items()}
        places = zip(news, created, strict=True)
        return {key: Owner(item.handle) for key, item in places}

    def _claim(self, lease: Lease, key: ContentKey, new: NewObject) -> Outcome:
        try:
            created = self._create(lease, new, key)
        except AfferentError as error:
            return self._failed(error)
        if created is not None:
            return Owner(created.handle)
        self.waiters.join(lease, key, would_make=new)
        return InFlight()

    def _create(
        self, lease: Lease, new: NewObject, unplaced: Job | ContentKey
    ) -> StoredObject | None:
        """Create an object; if it is reserved and has no extent, ``unplaced`` waits for one."""
        created = self.objects.create(lease, new)
        if created is None:
            if self.objects.budget.reservation_of(lease, new.kind) < round_up(new.nbytes):
                raise self.objects.no_extent({new.kind: round_up(new.nbytes)})
            self._unplaced.append(unplaced)
        return created

    def _have_made(self, lease: Lease, item: Wanted) -> Outcome:
        if not isinstance(item, Claim | Queue | Fetch):
            return Absent()
        if isinstance(item, Fetch) and not self.idle.can_fetch:
            return Absent()
        self.num_misses += 1
        if isinstance(item, Claim):
            return self._claim(lease, ContentKey(item.key), _new(item))
        try:
            job = self._make_job(lease, item)
        except AfferentError as error:
            return Absent() if isinstance(item, Fetch) else self._failed(error)
        self.jobs.add(job)
        self.waiters.join(lease, job.key)
        return Scheduled()

    def _make_job(self, lease: Lease, item: Queue | Fetch) -> Job:
        key, new = ContentKey(item.key), _new(item)
        given, payload = ([], b"") if isinstance(item, Fetch) else (item.inputs, item.payload)
        inputs = self.objects.resolve_sealed(given)
        job = Job(
            *(self.jobs.next_id(), key, new, inputs, payload),
            lease=lease,
            share=self._share_of(lease),
            cost_us=item.cost_us,
            is_fetch=self.idle.can_fetch and (isinstance(item, Fetch) or new.kind in TIERED),
            can_be_made=isinstance(item, Queue),
        )
        own, budget = (STORE, job.id), self.objects.budget
        try:
            # Inputs are pinned first, so that space for the target does not evict them. The
            # reservation follows, because it is for the target alone.
            self.objects.pin_all(own, inputs)
            budget.hand_over(lease, own, new.kind, round_up(new.nbytes))
            job.target = self._create(own, new, job)
        except AfferentError:
            budget.hand_over(own, lease, new.kind, budget.reservation_of(own, new.kind))
            self.objects.drop_lease(own)
            raise
        return job

    def _hand_on(self, key: ContentKey, *, now_s: float) -> None:
        """Let the first waiting request that can make ``key`` do so."""
        if not self.waiters.is_awaited(key) or self.objects.find(key) or self.jobs.find(key):
            return
        if self._crashes.is_quarantined(key, now_s=now_s):
            self.failed(key, _QUARANTINED)
            return
        for lease, new in self.waiters.candidates(key):
            try:
                created = self._create(lease, new, key)
            except AfferentError as error:
                self.waiters.resolve_one(key, lease, self._failed(error))
                continue
            if created is not None:
                self.waiters.resolve_one(key, lease, Owner(created.handle))
            return
        self.failed(key, _WORKER_DIED)

    def _hand_out_jobs(self, now_s: float) -> None:
        for job in self.idle.hand_out(now_s=now_s):
            self._drop_absent(job)

    def _not_fetched(self, job: Job, worker: ClientId, *, now_s: float) -> None:
        """Make a job here that the tier did not have; its fetcher no longer writes."""
        self.objects.move_lease((worker, job.id), (STORE, job.id))
        self.jobs.make_instead(job)
        if not job.can_be_made or not self.waiters.is_awaited(job.key):
            self._drop_absent(job)
        self._hand_out_jobs(now_s)

    def _failed(self, error: AfferentError) -> Failed:
        return Failed(self._failure_of(error))

    def _drop_absent(self, job: Job) -> None:
        """Drop a job that can't be made here; a waiting request may make it: see `hand_on`."""
        for lease in self.waiters.bystanders(job.key):
            self.waiters.resolve_one(job.key, lease, Absent(job.spans))
        self._drop(job)

    def _drop(self, job: Job) -> None:
        self.jobs.remove(job)
        self.objects.drop_lease((STORE, job.id))


def _new(item: Claim | Queue | Fetch) -> NewObject:
    return NewObject(item.kind, item.nbytes, ContentKey(item.key), item.label)
