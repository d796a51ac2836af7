"""How a missing object comes to be, once, whoever asks for it. Pure.

It is made by a worker that takes the job, or by a request that creates and seals it itself; all
others who want it meanwhile wait. When a maker dies, another takes over. A key that has killed two
makers is refused for a minute, so that one picture that crashes a decoder can't take the pool down
again and again. A job that nobody waits for any more is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from afferent.errors import (
    AfferentError,
    MakerRefused,
    NotPermitted,
    StoreError,
    StoreRestarted,
    WorkerDied,
)
from afferent.store import messages as m
from afferent.store.allocator import round_up
from afferent.store.jobs import JOB_ID_BITS, Job, JobQueue, Strikes
from afferent.store.ledger import ClientId, Lease
from afferent.store.objects import ObjectTable
from afferent.store.stored import NewObject, ObjectState, StoredObject
from afferent.store.waiters import Waiters
from afferent.types import ContentKey, Failure, Span

_STORE: ClientId = 0
"""The store's own leases hold the objects of jobs that no worker has taken yet."""

_WORKER_DIED = Failure(
    WorkerDied.code, "the process that worked on an item of this request died; try again"
)
_REFUSED = Failure(
    MakerRefused.code, "this item killed the processes that worked on it; refused for now"
)


class Making:
    """``reply`` answers the `Wait` and `Take` of a client, by seq."""

    def __init__(
        self, objects: ObjectTable, reply: Callable[[ClientId, int, object], None]
    ) -> None:
        self.objects = objects
        self.jobs = JobQueue(first_id=objects.segment << JOB_ID_BITS)
        self.waiters = Waiters(reply)
        self.num_hits = self.num_misses = self.num_joined = 0
        self._reply = reply
        self._strikes = Strikes()
        self._idle: deque[tuple[ClientId, int]] = deque()  # workers and the seq of their `Take`
        # What has bytes, but waits for a run that is long enough: jobs, and keys to hand on.
        self._unplaced: deque[Job | ContentKey] = deque()

    # Asking

    def acquire(
        self, lease: Lease, items: Sequence[m.AcquireItem], *, now_s: float
    ) -> list[m.Outcome]:
        """Pin what exists, join what is being made, have made what is missing."""
        # What exists is pinned first: making room for the rest must not evict it.
        outcomes: list[m.Outcome | None] = [None] * len(items)
        if not self._are_unknown(items):
            outcomes = [self._find(lease, item, now_s) for item in items]
        if None not in outcomes:
            return [outcome for outcome in outcomes if outcome is not None]
        missing = [item for item, found in zip(items, outcomes, strict=True) if found is None]
        claimed = self._claim_all(lease, [item for item in missing if item.make == "self"])
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

    def worker_idle(self, worker: ClientId, seq: int, *, now_s: float) -> None:
        """A worker waits for a job."""
        self._idle.append((worker, seq))
        self._hand_out_jobs(now_s)

    def finish(self, worker: ClientId, request: m.Finish) -> None:
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
        lease = (worker, job.id)
        if request.failure is None:
            self.objects.seal(lease, job.target, used_nbytes=request.used_nbytes)
            self.sealed(job.target, request.spans)
        else:
            self.failed(job.key, request.failure, request.spans)
        self.jobs.remove(job)
        self.objects.drop_lease(lease)

    def sealed(self, item: StoredObject, spans: Sequence[Span] = ()) -> None:
        """Pin an object for all who wait for it, and tell them."""

        def made(lease: Lease) -> m.Outcome:
            self.objects.pin(lease, item)  # its writer holds it, so it takes no room
            return m.Outcome("made", item.handle, spans=list(spans))

        if item.key is not None:
            self._strikes.forget(item.key)
            if self.waiters.is_awaited(item.key):
                self.waiters.resolve(item.key, made)

    def failed(self, key: ContentKey, failure: Failure, spans: Sequence[Span] = ()) -> None:
        """Nobody can make this: all who wait for it fail."""
        outcome = m.Outcome("failed", failure=failure, spans=list(spans))
        self.waiters.resolve(key, lambda _: outcome)

    # Death

    def client_lost(self, client: ClientId, *, now_s: float) -> None:
        """A connection has ended: nobody can find what its requests were writing.

        Its jobs wait for its death: until then it could still write into their objects.
        """
        self._idle = deque(entry for entry in self._idle if entry[0] != client)
        targets = {id(job.target) for job in self.jobs.held_by(client)}
        for item in self.objects.written_by(client):
            if id(item) in targets or item.state is not ObjectState.CREATED:
                continue
            if item.key is not None:
                self._strikes.add(item.key, now_s=now_s)
            self.objects.doom(item)
        for lease in self.waiters.leases_of(client):
            self.stop_waiting(lease)

    def maker_died(self, worker: ClientId, *, now_s: float) -> None:
        """Hand the jobs of a dead worker on."""
        for job in self.jobs.held_by(worker):
            self._strikes.add(job.key, now_s=now_s)
            if self._strikes.refused(job.key, now_s=now_s):
                self.failed(job.key, _WORKER_DIED)
            if self.waiters.is_awaited(job.key):
                self.objects.move_lease((worker, job.id), (_STORE, job.id))
                self.jobs.put_back(job)
            else:
                self.jobs.remove(job)
        self._hand_out_jobs(now_s)

    def hand_on(self, *, now_s: float) -> None:
        """Find new makers for objects whose writers have given up or gone."""
        orphaned, self.objects.orphaned = self.objects.orphaned, []
        for key in orphaned:
            self._hand_on(key, now_s=now_s)

    def place_waiting(self, *, now_s: float) -> None:
        """Something was let go: try again what waits for a run that is long enough."""
        waiting, self._unplaced = self._unplaced, deque()
        for entry in waiting:
            if not isinstance(entry, Job):
                self._hand_on(entry, now_s=now_s)
            elif self.jobs.get(entry.id) is entry:
                target = self.objects.create((_STORE, entry.id), entry.new)
                if target is None:
                    self._unplaced.append(entry)
                else:
                    self.jobs.place(entry, target)
        self._hand_out_jobs(now_s)

    def unplaced_keys(self) -> list[ContentKey]:
        """What has bytes, but waits for a run."""
        return [entry.key if isinstance(entry, Job) else entry for entry in self._unplaced]

    def validate(self) -> None:
        """Check every rule of this class; for tests."""
        self.waiters.validate()
        self.jobs.validate()
        if self.objects.orphaned:
            raise StoreError("a key that lost its maker was not handed on")
        if self._idle and self.jobs.num_ready:
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
            if target.writer != (job.worker or _STORE, job.id):
                raise StoreError("a job's object belongs to somebody else")

    # Inner steps

    def _are_unknown(self, items: Sequence[m.AcquireItem]) -> bool:
        """Whether `_find` would find none of these: a whole request's new media, as a rule."""
        return (
            not self.waiters
            and not self._strikes
            and all(item.make is not None for item in items)
            and self.objects.has_none_of([item.key for item in items])
        )

    def _find(self, lease: Lease, item: m.AcquireItem, now_s: float) -> m.Outcome | None:
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
                return _failed(error)
            self.num_hits += 1
            return m.Outcome("hit", found.handle)
        if item.make == "find":
            return m.Outcome("absent")
        if found is not None and found.writer == lease:
            return m.Outcome("yours", found.handle)  # as it was told before
        # What is made and has no place yet is awaited, or nobody would make it any more.
        if found is not None or self.waiters.is_awaited(key):
            would_make = _new(item) if item.make == "self" else None
            self.waiters.join(lease, key, would_make=would_make)
            self.num_joined += 1
            return m.Outcome("busy")
        if item.make is None:
            return m.Outcome("absent")
        if self._strikes and self._strikes.refused(key, now_s=now_s):
            return m.Outcome("failed", failure=_REFUSED)
        return None

    def _claim_all(self, lease: Lease, items: Sequence[m.AcquireItem]) -> dict[bytes, m.Outcome]:
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
        return {key: m.Outcome("yours", item.handle) for key, item in places}

    def _claim(self, lease: Lease, key: ContentKey, new: NewObject) -> m.Outcome:
        try:
            created = self._create(lease, new, key)
        except AfferentError as error:
            return _failed(error)
        if created is not None:
            return m.Outcome("yours", created.handle)
        self.waiters.join(lease, key, would_make=new)
        return m.Outcome("busy")

    def _create(
        self, lease: Lease, new: NewObject, unplaced: Job | ContentKey
    ) -> StoredObject | None:
        """A new object; without a run for it, ``unplaced`` is what waits, if it has a grant."""
        created = self.objects.create(lease, new)
        if created is None:
            if self.objects.ledger.grant_of(lease, new.kind) < round_up(new.nbytes):
                raise self.objects.no_run()
            self._unplaced.append(unplaced)
        return created

    def _have_made(self, lease: Lease, item: m.AcquireItem) -> m.Outcome:
        self.num_misses += 1
        if not isinstance(item.make, m.JobSpec):
            return self._claim(lease, ContentKey(item.key), _new(item))
        try:
            job = self._make_job(lease, _new(item), item.make)
        except AfferentError as error:
            return _failed(error)
        self.jobs.add(job)
        self.waiters.join(lease, job.key)
        return m.Outcome("miss")

    def _make_job(self, lease: Lease, new: NewObject, spec: m.JobSpec) -> Job:
        if new.key is None:
            raise StoreError("a job makes an object with a key")
        inputs = self.objects.resolve_sealed(spec.inputs)
        job = Job(self.jobs.next_id(), new.key, new, inputs, spec.payload)
        own, ledger = (_STORE, job.id), self.objects.ledger
        try:
            # Pinned first, so that making room does not evict them; and before the grant comes,
            # which is for the target alone.
            self.objects.pin_all(own, inputs)
            ledger.hand_over(lease, own, new.kind, round_up(new.nbytes))
            job.target = self._create(own, new, job)
        except AfferentError:
            ledger.hand_over(own, lease, new.kind, ledger.grant_of(own, new.kind))
            self.objects.drop_lease(own)
            raise
        return job

    def _hand_on(self, key: ContentKey, *, now_s: float) -> None:
        """Let the first of those who wait for ``key`` and could make it do so."""
        if not self.waiters.is_awaited(key) or self.objects.find(key) or self.jobs.find(key):
            return
        if self._strikes.refused(key, now_s=now_s):
            self.failed(key, _REFUSED)
            return
        for lease, new in self.waiters.candidates(key):
            try:
                created = self._create(lease, new, key)
            except AfferentError as error:
                self.waiters.resolve_one(key, lease, _failed(error))
                continue
            if created is not None:
                self.waiters.resolve_one(key, lease, m.Outcome("yours", created.handle))
            return
        self.failed(key, _WORKER_DIED)

    def _hand_out_jobs(self, now_s: float) -> None:
        while self._idle:
            job = self.jobs.take(self._idle[0][0], now_s=now_s)
            if job is None or job.target is None:
                return
            worker, seq = self._idle.popleft()
            self.objects.move_lease((_STORE, job.id), (worker, job.id))
            inputs = [source.handle for source in job.inputs]
            self._reply(worker, seq, m.Order(job.id, job.target.handle, inputs, job.payload))

    def _drop(self, job: Job) -> None:
        self.jobs.remove(job)
        self.objects.drop_lease((_STORE, job.id))


def _new(item: m.AcquireItem) -> NewObject:
    return NewObject(item.kind, item.nbytes, ContentKey(item.key))


def _failed(error: AfferentError) -> m.Outcome:
    return m.Outcome("failed", failure=Failure(error.code, error.message))
