"""Processes that put load on a store until they are killed.

python -m tests.store.storm_worker ADDRESS LOG PID      (started by `tests.store.storm`)

The process reads lines ``ROLE SEED`` from stdin and forks a client for each, so that a start takes
milliseconds. Clients append lines ``PID EVENT VALUE`` to the log, which outlives them.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from afferent.errors import StaleHandle, StoreFull, StoreUnavailable
from afferent.runtime.process import die_with_parent
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.protocol.items import SealItem
from afferent.store.protocol.results import Failed, Hit, InFlight, Made, Outcome, Owner, Scheduled
from afferent.types import ContentKey, CreateItem, Failure, Handle, ObjectKind, ReserveItem
from tests.store import storm_loop
from tests.store.storm_content import (
    ITEMS,
    RETRYABLE,
    Log,
    acquire_items,
    check_content,
    content_of,
    nbytes_of,
    some_keys,
)

_WAIT_S = 5.0
_CHILD_LIFE_S = 1.5


class Client:
    """The load of one process; `ROLES` maps its role to the method that it repeats."""

    def __init__(self, role: str, seed: int, address: str, log: Log) -> None:
        self.role, self.address, self.log = role, address, log
        self.rng = random.Random(seed)
        self.store = DaemonStore(address, name=role, writable=role not in ("reader", "holder"))
        self._num_requests = 0
        self._request = ""

    def run(self, step: Callable[[Client], None], *, until_s: float = float("inf")) -> None:
        """Repeat ``step`` until killed; only retryable errors are expected."""
        try:
            while time.monotonic() < until_s:
                self._num_requests += 1
                self._request = f"{self.role} {self._num_requests}"
                try:
                    step(self)
                except RETRYABLE as error:
                    self.log("retry", error.code)
                    time.sleep(0.01)
                except (StoreFull, StaleHandle) as error:
                    self.log("refused", error.code)
                self.store.forget(self._request)
                time.sleep(self.rng.uniform(0.002, 0.008))
        except BaseException:
            self.log("failed", f"{self.role}: {traceback.format_exc()!r}")
            os._exit(1)

    # Roles

    def write(self) -> None:
        """Make missing objects, in several steps; read those that exist."""
        choice = self.rng.random()
        if choice < 0.3:
            self._write_without_key()
        elif choice < 0.4:
            listed = self.store.list_objects(limit=50)  # includes objects that other clients read
            self.store.delete([item.key for item in listed[:10] if item.key])
        else:
            self._acquire("self", ObjectKind.FEATURES, some_keys(self.rng, self.rng.randint(1, 4)))

    def read(self) -> None:
        """Read existing objects, by key or by the handles of other clients."""
        if self.rng.random() < 0.3:
            self._look(self._get_some(3))
        else:
            self._acquire(None, ObjectKind.FEATURES, some_keys(self.rng, 8))

    def hold(self) -> None:
        """Read the same objects for a second: longer than a restart of the daemon takes."""
        self._look(self._get_some(20), num_times=20, pause_s=0.05)

    def ask(self) -> None:
        """Have workers make objects, some of them from raw media that are written first."""
        handles = [self._write_raw()] if self.rng.random() < 0.5 else []
        keys = some_keys(self.rng, self.rng.randint(1, 6))
        self._acquire("job", ObjectKind.EMBEDDINGS, keys, inputs=handles)

    def work(self, chance_to_fail: float = 0.0) -> None:
        """Take a job, read its inputs, and write its target."""
        order = self.store.take()
        for handle in order.inputs:
            self._verify(handle)
        if self.rng.random() < chance_to_fail:
            self.store.finish(order, failure=Failure("invalid_media", "a bad picture"))
            return
        self.log("begun", order.payload.hex())
        used = self._fill(order.target, order.payload)
        self.store.finish(order, used_nbytes=used)
        self.log("made", order.payload.hex())

    def fork(self) -> None:
        """Pin an object and half write another, with a child process that outlives this one."""
        handle = self._write_raw()
        key = some_keys(self.rng, 1)[0]
        news = [CreateItem(ObjectKind.RAW, nbytes_of(key))]
        (half,) = self.store.create(self._request, news)
        self.store.block(half)[:32] = key
        if os.fork() == 0:
            self._be_a_child()
        deadline = time.monotonic() + _CHILD_LIFE_S + 0.5  # one child at a time
        while time.monotonic() < deadline:
            self._verify(handle)
            time.sleep(0.02)

    def _be_a_child(self) -> None:
        """Keep the parent's socket open, or close it and become another client."""
        end_s = time.monotonic() + _CHILD_LIFE_S
        if self.rng.random() < 0.5:
            time.sleep(_CHILD_LIFE_S)
            os._exit(0)
        self.store.forget(self._request)
        self.store.close()
        with suppress(StoreUnavailable):
            own = Client("child", self.rng.randrange(1 << 30), self.address, self.log)
            own.run(self.rng.choice([Client.read, Client.write]), until_s=end_s)
            own.store.close()
        os._exit(0)

    # Eight processes that request the same items

    def want_items(self) -> None:
        """Have workers make all items, at once."""
        self._want(ITEMS, "job")
        self.log("done")
        signal.pause()

    def claim_items(self) -> None:
        """Get all items in batches, in an order of its own, and make the missing ones."""
        items = self.rng.sample(ITEMS, len(ITEMS))
        for start in range(0, len(items), 10):
            self._want(items[start : start + 10], "self")
        self.log("done")
        signal.pause()

    def _want(self, keys: Sequence[ContentKey], make: str) -> None:
        """Get keys and keep them pinned; log each failure with its reason."""
        for key in keys:
            self.log("asks", key.hex())
        outcomes = self.store.acquire("all", acquire_items(keys, ObjectKind.FEATURES, make))
        while keys:
            found = list(zip(keys, outcomes, strict=True))
            for key, outcome in found:
                self.log("claimed" if isinstance(outcome, Owner) else "told", key.hex())
            for key, outcome in found:
                self._receive(key, outcome)
            keys = [key for key, outcome in found if isinstance(outcome, InFlight | Scheduled)]
            for key in keys:
                self.log("asks", key.hex())
            outcomes = self.store.wait("all", keys, timeout_s=60.0) if keys else []

    def _receive(self, key: ContentKey, outcome: Outcome) -> None:
        """Make the object if this client owns it, and verify it."""
        if isinstance(outcome, Failed):
            self.log("lost", f"{key.hex()} {outcome.failure.code}")
        elif isinstance(outcome, Hit | Made | Owner):
            handle = outcome.handle
            if isinstance(outcome, Owner):
                self.log("begun", key.hex())
                used = self._fill(handle, key)
                (handle,) = self.store.seal("all", [SealItem(handle, used)])
                self.log("made", key.hex())
            self._verify(handle, key)
            self.log("got", key.hex())

    # Helpers

    def _acquire(
        self,
        make: str | None,
        kind: ObjectKind,
        keys: list[ContentKey],
        inputs: Sequence[Handle] = (),
    ) -> None:
        """Acquire, make the owned objects, wait for the others, and verify all."""
        outcomes = self.store.acquire(self._request, acquire_items(keys, kind, make, inputs))
        while keys:
            found = list(zip(keys, outcomes, strict=True))
            for key, outcome in found:
                if isinstance(outcome, Owner):
                    self._make(outcome.handle, key)
            ready = [it.handle for _, it in found if isinstance(it, Hit | Made)]
            self._look(ready)
            for _, outcome in found:
                if isinstance(outcome, Failed):
                    self.log("refused", outcome.failure.code)
            keys = [key for key, outcome in found if isinstance(outcome, InFlight | Scheduled)]
            outcomes = self.store.wait(self._request, keys, timeout_s=_WAIT_S) if keys else []

    def _make(self, handle: Handle, key: ContentKey) -> None:
        used = self._fill(handle, key)
        if self.rng.random() < 0.1:
            self.store.abort(self._request, [handle])
            return
        (sealed,) = self.store.seal(self._request, [SealItem(handle, used)])
        self._verify(sealed, key)

    def _write_without_key(self) -> None:
        """Write an object without a key, sometimes with a larger reservation."""
        if self.rng.random() < 0.5:
            room = [ReserveItem(ObjectKind.RAW, 1 << 20)]
            self.store.reserve(self._request, room, timeout_s=_WAIT_S)
        self._look([self._write_raw()])

    def _write_raw(self) -> Handle:
        key = some_keys(self.rng, 1)[0]
        nbytes = nbytes_of(key) + self.rng.randrange(5000)  # sealing trims it
        (handle,) = self.store.create(self._request, [CreateItem(ObjectKind.RAW, nbytes)])
        used = self._fill(handle, key)
        (sealed,) = self.store.seal(self._request, [SealItem(handle, used)])
        return sealed

    def _fill(self, handle: Handle, key: bytes) -> int:
        """Write in several steps, so that a kill can interrupt it."""
        target, content = np.frombuffer(self.store.block(handle), np.uint8), content_of(key)
        for part in np.array_split(np.arange(len(content)), self.rng.randint(1, 5)):
            target[part[0] : part[-1] + 1] = content[part[0] : part[-1] + 1]
            time.sleep(self.rng.uniform(0.0, 0.002))
        return len(content)

    def _get_some(self, count: int) -> list[Handle]:
        """Pin objects that other clients have made."""
        listed = self.store.list_objects(limit=50)
        sealed = [item.handle for item in listed if item.state == "sealed"]
        handles = self.rng.sample(sealed, min(len(sealed), count))
        self.store.get(self._request, handles)
        return handles

    def _look(
        self, handles: Sequence[Handle], *, num_times: int = 2, pause_s: float | None = None
    ) -> None:
        """Verify pinned objects several times, with pauses.

        Their content must not change, even if the daemon dies in the meantime.
        """
        arrays = [np.frombuffer(self.store.block(handle), np.uint8) for handle in handles]
        pause_s = pause_s or self.rng.choice([0.0, 0.0, 0.01, 0.1])
        for _ in range(num_times):
            for array in arrays:
                self._check(array)
            time.sleep(pause_s)

    def _verify(self, handle: Handle, key: bytes | None = None) -> None:
        self._check(np.frombuffer(self.store.block(handle), np.uint8), key)

    def _check(self, array: NDArray[np.uint8], key: bytes | None = None) -> None:
        check_content(array, key)
        self.log.count_read()


ROLES: dict[str, Callable[[Client], None]] = {
    "writer": Client.write,
    "reader": Client.read,
    "holder": Client.hold,
    "requester": Client.ask,
    "worker": lambda client: client.work(chance_to_fail=0.05),
    "maker": Client.work,
    "forker": Client.fork,
    "wants": Client.want_items,
    "claims": Client.claim_items,
}


def _serve(role: str, seed: int, address: str, log: Log) -> None:
    if role == "loop":
        storm_loop.run(seed, address, log)
    Client(role, seed, address, log).run(ROLES[role])


def main() -> None:
    address, log_path, parent_pid = sys.argv[1], sys.argv[2], int(sys.argv[3])
    die_with_parent(parent_pid)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps killed clients
    own_pid = os.getpid()
    while line := sys.stdin.buffer.raw.readline():  # type: ignore[attr-defined]
        role, seed = line.decode().split()
        pid = os.fork()
        if pid == 0:
            die_with_parent(own_pid)
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            with suppress(StoreUnavailable):  # the daemon was killed too often to answer in time
                _serve(role, int(seed), address, Log(log_path))
            os._exit(0)
        os.write(1, b"%d\n" % pid)


if __name__ == "__main__":
    main()
