"""Pool of confined preprocess workers with a store of its own, for one program."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Final

import msgspec

from afferent.config import Limits
from afferent.errors import ConfigError, Unavailable
from afferent.media.families.registry import AnyFamily
from afferent.media.workers.launch import ENV, POOL, PoolSettings
from afferent.runtime.process import REFUSED, Child, LogSettings, Status, spawn
from afferent.store.daemon.server import StoreServer
from afferent.types import MiB, ObjectKind

log = logging.getLogger(__name__)

SHARES: Final[Mapping[ObjectKind, float]] = {
    ObjectKind.RAW: 0.2,
    ObjectKind.FEATURES: 0.78,
    ObjectKind.RECORDS: 0.02,
}
_ITEM_TIMEOUT_S: Final = 60.0
_MEMORY_NBYTES: Final = 1024 * MiB
_START_TIMEOUT_S: Final = 120.0
_MAX_FAILED_STARTS: Final = 3
_RESTART_S: Final = 0.05
_RESTART_FAILED_S: Final = 1.0


class WorkerPool:
    """Store and preprocess workers as children of this process.

    Invariants: a thread starts the workers' zygote and waits for it: children die with the thread
    that started them. It restarts a zygote that dies, and gives up after three failed starts. Then
    it ends the store, so that no client waits for workers that don't come back.
    """

    def __init__(
        self, family: AnyFamily, limits: Limits, *, num_workers: int, arena_nbytes: int
    ) -> None:
        """Start them, and wait until the workers are ready.

        Args:
            family: Family that the workers make features of.
            limits: Limits of an item.
            num_workers: Number of worker processes.
            arena_nbytes: Shared memory for files and features; it is allocated as it is filled.

        Raises:
            ConfigError: They don't start.
        """
        self._pid = os.getpid()
        self._server = StoreServer(arena_nbytes, shares=SHARES)
        self._settings = PoolSettings(
            store_address=self._server.address,
            family=family,
            limits=limits,
            num_workers=num_workers,
            item_timeout_s=_ITEM_TIMEOUT_S,
            memory_nbytes=_MEMORY_NBYTES,
        )
        self._log = LogSettings(level="error", format="text")
        self._ready, self._stop = threading.Event(), threading.Event()
        self._child: Child | None = None
        self._is_serving = self._has_given_up = False
        self._last_report = ""
        self._keeper = threading.Thread(target=self._run, name="worker-pool", daemon=True)
        self._keeper.start()
        self._ready.wait(_START_TIMEOUT_S)
        if not self._is_serving:
            self.close()
            raise ConfigError(f"the pool of workers did not start: {self._why}")

    @property
    def address(self) -> str:
        """Address of the pool's store."""
        return self._server.address

    @property
    def is_here(self) -> bool:
        """Whether this process started it, and not the one that it was forked from."""
        return os.getpid() == self._pid

    @property
    def pid(self) -> int:
        """Process that forks the workers; 0 while none runs."""
        child = self._child
        return 0 if child is None else child.pid

    def check(self) -> None:
        """Check that workers run, or will run again.

        Raises:
            Unavailable: They have ended for good.
        """
        if self._has_given_up:
            raise Unavailable(
                f"the pool of workers has ended, and can't be started again: {self._why}. Create a "
                "new Features"
            )

    @property
    def _why(self) -> str:
        return self._last_report or "standard error says why"

    def close(self) -> None:
        """End all processes; memory is freed with its last user."""
        if self._stop.is_set():
            return
        self._stop.set()
        if (child := self._child) is not None:
            child.popen.terminate()
        self._keeper.join()
        self._server.close()

    def _run(self) -> None:
        try:
            self._keep()
        finally:
            self._has_given_up = not self._stop.is_set()
            self._ready.set()
            if self._has_given_up:
                self._server.close()

    def _keep(self) -> None:
        failures = 0
        while not self._stop.is_set() and failures < _MAX_FAILED_STARTS:
            try:
                child = spawn("preprocess", POOL, self._settings, log=self._log, env=dict(ENV))
            except OSError as error:  # out of descriptors or memory, perhaps for a moment
                failures += 1
                self._last_report = str(error.strerror)
                log.warning("the pool of workers can't be started: %s", error.strerror)
                self._stop.wait(_RESTART_FAILED_S)
                continue
            self._child = child
            if self._stop.is_set():
                child.popen.terminate()
            self._is_serving = self._wait_ready(child)
            failures = 0 if self._is_serving else failures + 1
            if self._is_serving:
                self._ready.set()
            status = child.popen.wait()
            self._is_serving, self._child = False, None
            child.close()
            if status == REFUSED:  # a restart would not help
                return
            if not self._stop.wait(_RESTART_S):
                log.warning("the pool of workers has ended; it is started again")

    def _wait_ready(self, child: Child) -> bool:
        os.set_blocking(child.status_fd, True)
        with open(child.status_fd, "rb", closefd=False) as lines:
            for line in lines:
                status = msgspec.json.decode(line, type=Status)
                self._last_report = status.text
                if status.ready:
                    return True
        return False
