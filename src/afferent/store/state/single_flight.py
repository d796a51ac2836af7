"""How a missing object comes to be, once, whoever asks for it. Pure.

It is made by a worker that takes the job, or by a request that creates and seals it itself; all
others who want it meanwhile wait. When a maker dies, another takes over. A key that has killed two
makers is quarantined for a minute, so that one image that crashes a decoder can't take the pool
down again and again. A job that nobody waits for any more is dropped.

Where a tier is connected and has time, a job goes to it first: what is missing here may have been
made on another machine. Nothing ever waits for its turn there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from afferent.errors import (
    AfferentError,
    NotPermitted,
    Quarantined,
    StoreError,
    StoreRestarted,
    WorkerDied,
)
from afferent.quota.shares import NAMELESS, Share
from afferent.store.protocol import requests
from afferent.store.protocol.items import Claim, Fetch, Find, Join, Queue, Wanted
from afferent.store.protocol.results import Outcome, Role
from afferent.store.state.allocator import round_up
from afferent.store.state.idle_workers import STORE, IdleWorkers
from afferent.store.state.jobs import JOB_ID_BITS, CrashCounts, Job, JobQueue
from afferent.store.state.keeping import TIERED, KeepQueue
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
    """Events go in; what the `Wait`s and `Take`s of clients are answered with is taken out."""

    def __init__(
        self,
        objects: ObjectTable,
        share_of: Callable[[Lease], Share] = lambda _: NAMELESS,
        failure_of: Callable[[AfferentError], Failure] = Failure.of,
    ) -> None:
        """
        Args:
            share_of: Whose a request is.
            failure_of: An error as it is sent.
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
        # What has bytes, but waits for an extent that is long enough: jobs, and keys to hand on.
        self._unplaced: deque[Job | ContentKey] = deque()

    def take_answers(self) -> list[Answer]:
        """What is to be said, since the last call."""
        answers = list(self._answers)
        self._answers.clear()
        return answers

    # Asking

    def acquire(self, lease: Lease, items: Sequence[Wanted], *, now_s: float) -> list[Outcome]:
        """Pin what exists, join what is being made, have made what is missing."""
        # What exists is pinned first: making room for the rest must not evict it.
        outcomes: list[Outcome | None] = [None] * len(items)
        if not self._are_unknown(items):
            outcomes = [self._find(lease, item, now_s) for item in items]
        if None not in outcomes:
            return [outcome for outcome in outcomes if outcome is not None]
        missing = [item for item, found in zip(items, outcomes, strict=True) if found is None]
        claimed = self._claim_all(lease, [item for item in missing if isinstance(item, Claim)])
        # What is named twice is made once, and then found.
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
        """The jobs that run for this request alone, each with its worker."""
        found = (self.jobs.find(key) for key in self.waiters.awaited_alone(lease))
        return [(job.id, job.worker) for job in found if job is not None and job.worker is not None]

    def stop_waiting(self, lease: Lease) -> None:
        """The request has gone; a job that nobody else waits for is dropped if nobody works on it.

        One under way is finished: its object will be found by the next who asks.
        """
        for key in self.waiters.stop(lease):
            job = self.jobs.find(key)
            if job is not None and job.worker is None:
                self._drop(job)

    # Making

    def worker_idle(self, worker: ClientId, seq: int, *, now_s: float, role: Role = "make") -> None:
        """A worker waits for a job."""
        if role == "keep":
            self.keeping.keeper_idle(worker, seq)
            return
        self.idle.add(worker, seq, role)
        self._hand_out_jobs(now_s)

    def finish(self, worker: ClientId, request: requests.Finish, *, now_s: float) -> None:
        """The end of a job.

        Raises:
            NotPermitted: The worker does not hold it.
            StoreRestarted: It is of a former life of the store.
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
        """A request has made an object itself; who encodes does so for any tenant's."""
        owners = [source.tenant for source in sources]
        item.tenant = self._share_of(lease).tenant or next(iter(owners), "")
        self._tell_sealed(item, ())
        if made_us or item.kind in TIERED:
            self.keeping.add(item, cost_us=0, made_us=made_us)

    def _count(self, job: Job, failure: Failure | None, now_s: float) -> None:
        if job.is_fetch:
            self.num_jobs_fetched += 1
            return
        self.jobs.finished(job, now_s=now_s)
        if failure is not None:
            self.num_jobs_failed += 1
            return
        self.num_jobs_made += 1
        if job.target is not None and job.new.kind in TIERED:
            made_us = round((now_s - job.taken_s) * 1e6)
            self.keeping.add(job.target, cost_us=job.cost_us, made_us=made_us)

    def _tell_sealed(self, item: StoredObject, spans: Sequence[Span]) -> None:
        """Pin an object for all who wait for it, and tell them."""

        def made(lease: Lease) -> Outcome:
            self.objects.pin(lease, item)  # its writer holds it, so it takes no room
            return Outcome("made", item.handle, spans=list(spans))

        if item.key is not None:
            self._crashes.forget(item.key)
            if self.waiters.is_awaited(item.key):
                self.waiters.resolve(item.key, made)

    def failed(self, key: ContentKey, failure: Failure, spans: Sequence[Span] = ()) -> None:
        """Nobody can make this: all who wait for it fail."""
        outcome = Outcome("failed", failure=failure, spans=list(spans))
        self.waiters.resolve(key, lambda _: outcome)

    # Death

    def client_lost(self, client: ClientId, *, now_s: float) -> None:
        """A connection has ended: nobody can find what its requests were writing.

        Its jobs wait for its death: until then it could still write into their objects.
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
        """Hand the jobs of a dead worker on."""
        for job in self.jobs.held_by(worker):
            if job.is_fetch:  # no fault of what was to be fetched
                self._not_fetched(job, worker, now_s=now_s)
                continue
            self._crashes.add(job.key, now_s=now_s)
            if self._crashes.is_quarantined(job.key, now_s=now_s):
                self.failed(job.key, _WORKER_DIED)
            if self.waiters.is_awaited(job.key):
                self.objects.move_lease((worker, job.id), (STORE, job.id))
                self.jobs.put_back(job)
            else:
                self.jobs.remove(job)
        self._hand_out_jobs(now_s)

    def hand_on(self, orphaned: Iterable[ContentKey], *, now_s: float) -> None:
        """Find new makers for objects whose writers have given up or gone."""
        for key in orphaned if self.waiters else ():
            self._hand_on(key, now_s=now_s)

    def place_waiting(self, *, now_s: float) -> None:
        """Something was freed: try again what waits for an extent that is long enough."""
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
        """What has bytes, but waits for an extent."""
        return [entry.key if isinstance(entry, Job) else entry for entry in self._unplaced]

    def validate(self) -> None:
        """Check every rule of this class; for tests."""
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
        """Whether `_find` would find none of these: a whole request's new media, as a rule."""
        return (
            not self.waiters
            and not self._crashes
            and not any(isinstance(item, Join) for item in items)
            and self.objects.has_none_of([item.key for item in items])
        )

    def _find(self, lease: Lease, item: Wanted, now_s: float) -> Outcome | None:
        """What can be said of an item without making anything; ``None`` if it has to be made."""
        key = ContentKey(item.key)
        untold = self.waiters.untold(lease, key) if self.waiters else None
        if untold is not None:
            return untold
        found = self.objects.find(key)
        if found is not None and found.state is ObjectState.SEALED:
            try:
                self.objects.pin(lease, found)
            except AfferentError as error:
                return self._failed(error)
            self.num_hits += 1
            return Outcome("hit", found.handle)
        if isinstance(item, Find):
            return Outcome("absent")
        if found is not None and found.writer == lease:
            return Outcome("owner", found.handle)  # as it was told before
        # What is made and has no place yet is awaited, or nobody would make it any more.
        if found is not None or self.waiters.is_awaited(key):
            would_make = _new(item) if isinstance(item, Claim) else None
            self.waiters.join(lease, key, would_make=would_make)
            self.num_joined += 1
            return Outcome("in_flight")
        if isinstance(item, Join):
            return Outcome("absent")
        if self._crashes and self._crashes.is_quarantined(key, now_s=now_s):
            return Outcome("failed", failure=_QUARANTINED)
        return None

    def _claim_all(self, lease: Lease, items: Sequence[Claim]) -> dict[bytes, Outcome]:
        """Have a request make these objects itself: as many of them as there is room for."""
        news = {item.key: NewObject(item.kind, item.nbytes, ContentKey(item.key)) for item in items}
        self.num_misses += len(news)
        try:
            created = self.objects.create_all(lease, list(news.values()))
        except AfferentError:
            created = None
        if created is None:
            return {key: self._claim(lease, ContentKey(key), new) for key, new in news.items()}
        places = zip(news, created, strict=True)
        return {key: Outcome("owner", item.handle) for key, item in places}

    def _claim(self, lease: Lease, key: ContentKey, new: NewObject) -> Outcome:
        try:
            created = self._create(lease, new, key)
        except AfferentError as error:
            return self._failed(error)
        if created is not None:
            return Outcome("owner", created.handle)
        self.waiters.join(lease, key, would_make=new)
        return Outcome("in_flight")

    def _create(
        self, lease: Lease, new: NewObject, unplaced: Job | ContentKey
    ) -> StoredObject | None:
        """A new object; without an extent for it, ``unplaced`` is what waits, if it is reserved."""
        created = self.objects.create(lease, new)
        if created is None:
            if self.objects.budget.reservation_of(lease, new.kind) < round_up(new.nbytes):
                raise self.objects.no_extent({new.kind: round_up(new.nbytes)})
            self._unplaced.append(unplaced)
        return created

    def _have_made(self, lease: Lease, item: Wanted) -> Outcome:
        if not isinstance(item, Claim | Queue | Fetch):
            return Outcome("absent")
        if isinstance(item, Fetch) and not self.idle.can_fetch:
            return Outcome("absent")
        self.num_misses += 1
        if isinstance(item, Claim):
            return self._claim(lease, ContentKey(item.key), _new(item))
        try:
            job = self._make_job(lease, item)
        except AfferentError as error:
            return Outcome("absent") if isinstance(item, Fetch) else self._failed(error)
        self.jobs.add(job)
        self.waiters.join(lease, job.key)
        return Outcome("scheduled")

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
            # Pinned first, so that making room does not evict them; and before the reservation
            # comes, which is for the target alone.
            self.objects.pin_all(own, inputs)
            budget.hand_over(lease, own, new.kind, round_up(new.nbytes))
            job.target = self._create(own, new, job)
        except AfferentError:
            budget.hand_over(own, lease, new.kind, budget.reservation_of(own, new.kind))
            self.objects.drop_lease(own)
            raise
        return job

    def _hand_on(self, key: ContentKey, *, now_s: float) -> None:
        """Let the first of those who wait for ``key`` and could make it do so."""
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
                self.waiters.resolve_one(key, lease, Outcome("owner", created.handle))
            return
        self.failed(key, _WORKER_DIED)

    def _hand_out_jobs(self, now_s: float) -> None:
        for job in self.idle.hand_out(now_s=now_s):
            self._drop_absent(job)

    def _not_fetched(self, job: Job, worker: ClientId, *, now_s: float) -> None:
        """What a tier did not have is made here; nobody writes into its block any more."""
        self.objects.move_lease((worker, job.id), (STORE, job.id))
        self.jobs.make_instead(job)
        if not job.can_be_made or not self.waiters.is_awaited(job.key):
            self._drop_absent(job)
        self._hand_out_jobs(now_s)

    def _failed(self, error: AfferentError) -> Outcome:
        return Outcome("failed", failure=self._failure_of(error))

    def _drop_absent(self, job: Job) -> None:
        """Nobody makes this; of those who wait, somebody may: see `hand_on`."""
        for lease in self.waiters.bystanders(job.key):
            self.waiters.resolve_one(job.key, lease, Outcome("absent", spans=job.spans))
        self._drop(job)

    def _drop(self, job: Job) -> None:
        self.jobs.remove(job)
        self.objects.drop_lease((STORE, job.id))


def _new(item: Claim | Queue | Fetch) -> NewObject:
    return NewObject(item.kind, item.nbytes, ContentKey(item.key))
