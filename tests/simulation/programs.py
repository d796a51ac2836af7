"""Programs that use the library: they make, read, share, derive, cancel and disconnect."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable

from afferent.admission.shares import Share
from afferent.errors import (
    AfferentError,
    DeadlineExceeded,
    NotPermitted,
    StaleHandle,
    StoreFull,
    StoreRestarted,
    StoreUnavailable,
)
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.protocol.items import Claim, Find, SealItem
from afferent.store.protocol.results import Hit, InFlight, Made, Outcome, Owner, existing
from afferent.types import CreateItem, Failure, Handle, ObjectKind, ReserveItem
from tests.simulation.oracle import LINE_NBYTES, key_of
from tests.simulation.plan import NOTHING, Task
from tests.simulation.sizes import DERIVED, TENANTS, lines_of, sleep
from tests.simulation.workers import Blocking
from tests.simulation.world import ADDRESS


class Program(Blocking):
    """Does its tasks one after the other; in between, reads what other programs share with it."""

    def _work(self) -> None:
        name = self._process.name
        for task in sorted(self._world.tasks_of(name), key=lambda task: task.at_s):
            sleep(max(task.at_s - self._world.machine.now_s, 0.0))
            self._answer_mail()
            self._world.begin(task, self._process)
            if task.what == NOTHING:
                self._world.end(task, NOTHING)
            else:
                self._do(task)
        while True:  # other programs may still share objects with it
            sleep(0.2)
            self._answer_mail()

    def _do(self, task: Task) -> None:
        rng = random.Random(task.seed)
        request = f"{self._process.name}/{task.number}"
        self._store.introduce(request, Share(TENANTS[rng.randrange(2)]))
        try:
            self._kinds()[task.what](request, rng)
            outcome = "answered"
        except AfferentError as error:
            outcome = error.code
        self._store.forget(request)
        self._world.end(task, outcome)

    def _kinds(self) -> dict[str, Callable[[str, random.Random], None]]:
        return {
            "claim": self._claim,
            "read": self._read_key,
            "old": self._old,
            "private": self._private,
            "share": self._share,
            "derive": self._derive,
            "drop": self._drop,
            "permit": self._permit,
            "late": self._late,
            "late-permit": self._late_permit,
            "long": self._long,
            "scatter": self._scatter,
            "leave": self._leave,
        }

    def _key(self, rng: random.Random) -> int:
        return rng.randrange(self._plan.num_keys)

    def _claim(self, request: str, rng: random.Random) -> None:
        """Acquire keys, make those that this program owns, and read the others."""
        keys = list(dict.fromkeys(self._key(rng) for _ in range(rng.choice((1, 2)))))
        wanted = [
            Claim(key_of(k), ObjectKind.FEATURES, LINE_NBYTES * (lines_of(self._plan, k) + 1))
            for k in keys
        ]
        outcomes = self._timed("claim", 10.0, lambda: self._store.acquire(request, wanted))
        for _ in range(4):
            for key, outcome in zip(keys, outcomes, strict=True):
                if isinstance(outcome, Owner):
                    self._make(request, outcome.handle, key, rng)
                elif isinstance(outcome, Hit | Made):
                    self._read(outcome.handle, key)
            keys = [k for k, each in zip(keys, outcomes, strict=True) if isinstance(each, InFlight)]
            if not keys:
                return
            outcomes = self._wait(request, [key_of(key) for key in keys])

    def _wait(self, request: str, wanted: list[bytes]) -> list[Outcome]:
        limit_s = self._plan.timeout_s
        return self._timed(
            "wait", limit_s, lambda: self._store.wait(request, wanted, timeout_s=limit_s)
        )

    def _make(self, request: str, handle: Handle, key: int, rng: random.Random) -> None:
        if key == self._plan.poison:
            self._process.machine.after(0.0, self._process.machine.kill, self._process)
        used_nbytes = self._write(handle, key, pause_s=rng.choice((1e-4, 1e-2, 0.3)))
        match rng.randrange(6):
            case 0:
                self._store.abort(request, [handle])
            case 1:
                failure = Failure("invalid_media", "nobody can make this")
                self._store.abort(request, [handle], failure=failure)
            case _:
                (sealed,) = self._store.seal(request, [SealItem(handle, used_nbytes)])
                self._world.oracle.made(sealed, key)
                self._read(sealed, key)

    def _find(self, request: str, what: int) -> Handle | None:
        found = self._timed(
            "find", 10.0, lambda: self._store.acquire(request, [Find(key_of(what))])
        )
        return existing(found[0])

    def _read_key(self, request: str, rng: random.Random) -> None:
        what = self._key(rng) + rng.choice((0, DERIVED))
        if (handle := self._find(request, what)) is not None:
            source = self._read(handle, what)
            self._check_source(what, source)

    def _check_source(self, what: int, source: int) -> None:
        if what >= DERIVED and source != what - DERIVED + 1:
            self._world.machine.violate(f"derived: {what} was computed from {source - 1}")

    def _old(self, request: str, rng: random.Random) -> None:
        """Read old handles: each is still valid, or is refused."""
        seen = self._world.seen_handles
        for handle, what in rng.sample(seen, min(len(seen), 6)):
            try:
                self._timed("get", 10.0, lambda one=handle: self._store.get(request, [one]))
                self._read(handle, what)
            except (StaleHandle, StoreRestarted):
                continue

    def _private(self, request: str, rng: random.Random) -> None:
        """Write and read an object without a key, which is found by its handle only."""
        nbytes = LINE_NBYTES * rng.choice((2, 8, 30))
        item = CreateItem(ObjectKind.FEATURES, nbytes)
        (handle,) = self._timed("create", 10.0, lambda: self._store.create(request, [item]))
        used_nbytes = self._write(handle, 3000, pause_s=rng.choice((1e-4, 0.2)))
        (sealed,) = self._store.seal(request, [SealItem(handle, used_nbytes)])
        self._read(sealed, 3000)
        self._store.release(request, [sealed])

    def _scatter(self, request: str, rng: random.Random) -> None:
        """Fill space with small objects and free every second: no larger object fits."""
        for kind in (ObjectKind.FEATURES, ObjectKind.RECORDS):
            held: list[Handle] = []
            item = CreateItem(kind, LINE_NBYTES * rng.choice((1, 2)))
            with contextlib.suppress(StoreFull):
                while True:
                    held += self._store.create(request, [item])
            self._store.abort(request, held[rng.randrange(2) :: 2])
        sleep(0.2 + rng.random())

    def _share(self, request: str, rng: random.Random) -> None:
        """Pin an object for another program, and send it the handle even if the call failed."""
        # Not for itself: a release of the request would drop both pins.
        here = self._process.name
        others = [n for n in self._plan.libraries if n in self._world.numbers and n != here]
        what = self._key(rng)
        handle = self._find(request, what)
        if handle is None or not others:
            return
        other = rng.choice(others)
        number = self._world.numbers.get(other)
        if number is None:  # the other program has died in between
            return
        try:
            self._store.get(request, [handle], also_for=[number])
        finally:
            letter = (request, handle, what, number)
            self._world.mail.setdefault(other, []).append(letter)

    def _answer_mail(self) -> None:
        """Read what other programs have pinned for this one, and release it."""
        name, store = self._process.name, self._store
        self._world.numbers[name] = store.client_number
        for request, handle, what, number in self._world.mail.pop(name, []):
            try:
                if what % 2:
                    self._read_shared(request, handle, what, number)
                else:
                    self._derive_from(request, handle, what)
            except AfferentError:
                continue
            finally:
                store.forget(request)

    def _read_shared(self, request: str, handle: Handle, what: int, number: int) -> None:
        """Read an object if it is pinned for this connection.

        It is not pinned if the pin was for an earlier connection, or if the call that pins failed.
        """
        state, store = self._world.oracle.state, self._store
        if state is None or not store.is_open or store.client_number != number:
            return
        if any((number, request) in item.pins for item in state.objects):
            self._read(handle, what)

    def _derive(self, request: str, rng: random.Random) -> None:
        """Compute an object from features."""
        what = self._key(rng)
        source = self._find(request, what)
        if source is not None:
            self._derive_from(request, source, what)

    def _derive_from(self, request: str, source: Handle, what: int) -> None:
        """Compute from a source that may be unpinned; sealing checks that it was intact."""
        sleep(self._world.looking_s())  # a lost connection may have been restored in the meantime
        block = self._store.block(source)
        number = int.from_bytes(block[:8], "little")
        del block
        nbytes = LINE_NBYTES * (lines_of(self._plan, what) + 1)
        claim = Claim(key_of(what + DERIVED), ObjectKind.EMBEDDINGS, nbytes)
        (outcome,) = self._store.acquire(request, [claim])
        if not isinstance(outcome, Owner):
            return
        used = self._write(outcome.handle, what + DERIVED, source=number + 1, pause_s=0.01)
        (sealed,) = self._store.seal(request, [SealItem(outcome.handle, used, [source])])
        self._check_source(what + DERIVED, self._read(sealed, what + DERIVED))

    def _drop(self, request: str, rng: random.Random) -> None:
        """Delete and evict, as an operator would, objects that other clients may be reading."""
        keys = [key_of(self._key(rng)), key_of(self._key(rng) + DERIVED)]
        self._store.delete(keys)
        self._store.evict(ObjectKind.FEATURES, None if rng.random() < 0.5 else 64)
        self._store.stat()
        self._store.list_clients()
        self._store.list_objects()

    def _permit(self, request: str, rng: random.Random) -> None:
        limit_s = self._plan.timeout_s
        self._timed(
            "permit",
            limit_s,
            lambda: self._store.acquire_permit(
                request, "preprocess", limit=max(self._plan.permits, 1), timeout_s=limit_s
            ),
        )
        sleep(rng.random() * 0.3)

    def _late(self, request: str, rng: random.Random) -> None:
        """Cancel calls early: their answers arrive after the calls have ended."""
        nbytes, num_reserved = LINE_NBYTES * 4, 0
        room = [ReserveItem(ObjectKind.RECORDS, nbytes)]
        number = self._store.client_number
        for _ in range(3):
            try:
                self._store.reserve(request, room, timeout_s=rng.choice((1e-4, 3e-4, 1e-3)))
                num_reserved += 1
            except DeadlineExceeded:
                continue
        for each in self._store.list_clients():
            if each.client == number and each.reserved_nbytes != num_reserved * nbytes:
                self._world.machine.violate(
                    f"given up: {request} has {each.reserved_nbytes} bytes reserved of {nbytes} * "
                    f"{num_reserved}"
                )

    def _late_permit(self, request: str, rng: random.Random) -> None:
        """Cancel calls for a permit early: none of them may leave a permit behind."""
        for _ in range(4):
            try:
                self._store.acquire_permit(
                    request, "late", limit=1, timeout_s=rng.choice((1e-4, 3e-4, 1e-3))
                )
            except DeadlineExceeded:
                continue
            except NotPermitted:
                self._world.machine.violate(f"given up: {request} has a permit already")
            self._store.release_permit(request, "late")

    def _long(self, request: str, rng: random.Random) -> None:
        """Cancel a long message while it is sent: the next call still gets an answer, or fails."""
        unknown = [key_of(number) for number in range(rng.choice((5, 40)))]
        with contextlib.suppress(DeadlineExceeded, NotPermitted):
            self._store.wait(request, unknown, timeout_s=rng.choice((1e-4, 1e-3, 1e-1)))
        try:
            self._store.stat()
        except DeadlineExceeded:
            self._world.machine.violate(f"unanswered: {request} hears nothing of the store")

    def _leave(self, request: str, rng: random.Random) -> None:
        """Close the store, even with pinned objects, and later open another."""
        self._find(request, self._key(rng))
        self._store.close()
        self._world.numbers.pop(self._process.name, None)
        sleep(rng.random() * 0.1)
        while True:
            try:
                self._store = DaemonStore(ADDRESS, name=self._process.name, writable=True)
                break
            except StoreUnavailable:
                sleep(0.1)
