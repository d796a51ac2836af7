"""Runner of a store daemon: the descriptors that outlive it, and `StoreServer` for programs."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

import msgspec

from afferent.errors import NotPermitted, StoreUnavailable
from afferent.runtime import logs, wire
from afferent.runtime.process import Child, LogSettings, Status, spawn
from afferent.runtime.sockets import new_address
from afferent.store.daemon.client_table import create_client_table
from afferent.store.daemon.launch import DAEMON, DaemonSettings
from afferent.store.segment import create_segment, open_segment
from afferent.store.state.region import LIBRARY_SHARES, divide
from afferent.types import ObjectKind

log = logging.getLogger(__name__)

SOCKET_NAME = "store"
_START_TIMEOUT_S = 30.0
_RESTART_S, _RESTART_FAILED_S = 0.05, 1.0
_MAX_FAILED_STARTS = 3


@dataclass(frozen=True, slots=True)
class InheritedDescriptors:
    """Descriptors that each daemon inherits: the arena, the socket and the client table."""

    address: str
    arena_fd: int
    listener_fd: int
    client_table_fd: int

    @classmethod
    def create(cls, capacity_nbytes: int, *, preallocate: bool = False) -> Self:
        """Create them, with a new arena and a socket in a folder of this process.

        Args:
            preallocate: Allocate the whole arena now, and not as it is filled.

        Raises:
            ConfigError: There is not enough memory.
        """
        create_arena = create_segment if preallocate else open_segment
        return cls.over(create_arena(capacity_nbytes))

    @classmethod
    def over(cls, arena_fd: int, *, path: str = "") -> Self:
        """Create them with an existing arena.

        Args:
            path: Path of the socket; by default, in a folder of this process.

        Raises:
            ConfigError: The socket can't be created there.
        """
        address = path or new_address(SOCKET_NAME)
        return cls(address, arena_fd, wire.listen(address).detach(), create_client_table())

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that the daemon inherits."""
        return (self.arena_fd, self.listener_fd, self.client_table_fd)

    def settings(
        self,
        segment: int,
        *,
        shares: Mapping[ObjectKind, float],
        job_timeout_s: float,
        recovery_timeout_s: float | None,
        fetch_timeout_s: float = 60.0,
    ) -> DaemonSettings:
        """Return the settings for the daemon of one epoch; each epoch has its own number."""
        return DaemonSettings(
            arena_fd=self.arena_fd,
            listener_fd=self.listener_fd,
            client_table_fd=self.client_table_fd,
            segment=segment,
            shares=dict(shares),
            job_timeout_s=job_timeout_s,
            fetch_timeout_s=fetch_timeout_s,
            recovery_timeout_s=recovery_timeout_s,
        )

    def close(self) -> None:
        """Close all descriptors and remove the socket's file."""
        Path(self.address).unlink(missing_ok=True)
        for fd in self.fds:
            os.close(fd)


class StoreServer:
    """Store daemon as a child of this process; other processes connect to ``address``.

    Examples:
        >>> from afferent import DaemonStore, MiB, StoreServer
        >>> with StoreServer(16 * MiB) as server:
        ...     with DaemonStore(server.address, name="me", writable=True) as store:
        ...         print(store.capacity_nbytes // MiB, "MiB for all who connect")
        16 MiB for all who connect

    A dead daemon is replaced: the arena stays, its contents are lost. The end of this process ends
    the daemon and frees the arena in every case.
    """

    def __init__(
        self,
        capacity_nbytes: int,
        *,
        shares: Mapping[ObjectKind, float] = LIBRARY_SHARES,
        job_timeout_s: float = 60.0,
        recovery_timeout_s: float | None = None,
        log_level: str = "warning",
        preallocate: bool = False,
    ) -> None:
        """Start the daemon and wait until it is ready.

        Args:
            shares: Part of the arena for each kind of object, such as
                ``{ObjectKind.FEATURES: 0.5, ObjectKind.EMBEDDINGS: 0.5}``. By default, features,
                the kind of `Store.put` and `ItemCache`, have all of it.
            job_timeout_s: A worker that takes longer for a job is killed.
            recovery_timeout_s: After a restart, a process that still has arrays over the arena
                after this time is killed; ``None`` waits for it.
            preallocate: Allocate the whole arena now, and not as it is filled.

        Raises:
            ConfigError: There is not enough memory, or a setting is invalid.
            StoreUnavailable: The daemon does not start; its log gives the reason.
        """
        logs.show_unconfigured()
        divide(capacity_nbytes, shares)  # refused here, not in the daemon's log
        self._inherited = InheritedDescriptors.create(capacity_nbytes, preallocate=preallocate)
        self._shares = dict(shares)
        self._job_timeout_s, self._recovery_timeout_s = job_timeout_s, recovery_timeout_s
        self._log = LogSettings(level=log_level, format="text")
        self._child: Child | None = None
        self._ready, self._stop = threading.Event(), threading.Event()
        # The kernel ends the daemon when the *thread* that started it ends.
        self._is_serving = False
        self._keeper = threading.Thread(target=self._run, name="store-server", daemon=True)
        self._keeper.start()
        self._ready.wait(_START_TIMEOUT_S)
        if not self._is_serving:
            self.close()
            raise StoreUnavailable("the store daemon does not start; its log says why")

    def __reduce__(self) -> NoReturn:
        raise NotPermitted(
            "a StoreServer can't be pickled or copied. Hand over its address, and open a store in "
            f'that process, as by: store = DaemonStore({self.address!r}, name="worker")'
        )

    @property
    def address(self) -> str:
        return self._inherited.address

    @property
    def arena_fd(self) -> int:
        """Descriptor of the arena's memory."""
        return self._inherited.arena_fd

    @property
    def pid(self) -> int:
        """Pid of the current daemon."""
        if self._child is None:
            raise StoreUnavailable("the store daemon is not running")
        return self._child.pid

    @property
    def has_ended(self) -> bool:
        """Whether there is no daemon any more: closed, or too many starts failed in a row."""
        return not self._keeper.is_alive()

    def close(self) -> None:
        """End the daemon and free the memory, once all clients have unmapped it too."""
        if self._stop.is_set():
            return
        self._stop.set()
        if (child := self._child) is not None:
            child.popen.kill()
        self._keeper.join()
        self._inherited.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            self._keep()
        finally:
            self._ready.set()

    def _keep(self) -> None:
        """Start the daemon, and restart it when it ends."""
        segment = failures = 0
        while not self._stop.is_set() and failures < _MAX_FAILED_STARTS:
            segment += 1
            settings = self._inherited.settings(
                segment,
                shares=self._shares,
                job_timeout_s=self._job_timeout_s,
                recovery_timeout_s=self._recovery_timeout_s,
            )
            try:
                child = spawn("store", DAEMON, settings, log=self._log, fds=self._inherited.fds)
            except OSError as error:  # out of descriptors or memory, perhaps for a moment
                failures += 1
                log.warning("the store daemon can't be started: %s", error.strerror)
                self._stop.wait(_RESTART_FAILED_S)
                continue
            self._child = child
            if self._stop.is_set():
                child.popen.kill()
            os.set_blocking(child.status_fd, True)
            self._is_serving = _is_ready(child)
            failures = 0 if self._is_serving else failures + 1
            if self._is_serving:
                self._ready.set()
            child.popen.wait()
            self._is_serving, self._child = False, None
            child.close()
            if not self._stop.wait(_RESTART_S):
                log.warning("the store daemon has ended; it is started again")


def _is_ready(child: Child) -> bool:
    """Wait until the daemon reports that it serves."""
    with open(child.status_fd, "rb", closefd=False) as lines:
        return any(msgspec.json.decode(line, type=Status).ready for line in lines)
