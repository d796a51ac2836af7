"""Store of one process, without a daemon: the same verbs over the same state machine."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from afferent.errors import DeadlineExceeded, FormatError, StoreRestarted, StoreUnavailable
from afferent.store.arena import ArenaMap
from afferent.store.backing import Backing
from afferent.store.client.owner import Owner
from afferent.store.client.store import Store
from afferent.store.protocol.replies import Reply, refusal, request_decoder
from afferent.store.protocol.requests import Request
from afferent.store.segment import open_segment
from afferent.store.state.machine import Replies, StoreState
from afferent.store.state.region import LIBRARY_SHARES, divide
from afferent.types import Handle, ObjectKind, decode, encode

_CLIENT = 1
_FIRST_SEGMENT = 1 << 20
_LOOK_AGAIN_S = 0.02

_OPENING = (
    'store = DaemonStore(address, name="worker", writable=True), with the address of a StoreServer '
    "instead of this LocalStore"
)

_segments = itertools.count(_FIRST_SEGMENT)
"""Unique in a process, and different from a daemon's: handles of other stores are refused."""


class LocalStore(Store):
    """Store for one process, and for tests. Threads may wait for each other's objects.

    Examples:
        >>> import numpy as np
        >>> from afferent import LocalStore, MiB
        >>> with LocalStore(4 * MiB) as store:
        ...     handle = store.put("request-1", {"pixels": np.arange(6.0)})
        ...     with store.view(handle) as tree:
        ...         print(tree["pixels"].sum(), "a copy:", tree["pixels"].flags.owndata)
        ...     del tree
        ...     store.release("request-1")
        15.0 a copy: False
    """

    def __init__(
        self, capacity_nbytes: int, *, shares: Mapping[ObjectKind, float] = LIBRARY_SHARES
    ) -> None:
        """Create the arena; it takes memory as it is filled.

        Args:
            shares: Part of the arena for each kind of object, such as
                ``{ObjectKind.FEATURES: 0.5, ObjectKind.EMBEDDINGS: 0.5}``. By default, features,
                the kind of `Store.put` and `ItemCache`, have all of it.

        Raises:
            ConfigError: There is not enough memory, or a setting is invalid.
        """
        super().__init__()
        divide(capacity_nbytes, shares)  # refuses before there is an arena
        self._fd = open_segment(capacity_nbytes)
        self._arena = ArenaMap(self._fd, writable=True)
        self._segment = next(_segments)
        self._state = StoreState(
            self._arena.nbytes,
            segment=self._segment,
            shares=shares,
            back=Backing(self._fd, ahead=False).back,
        )
        self._state.connect(_CLIENT, name="local", pid=os.getpid())
        self._changed = threading.Condition()
        self._replies: dict[int, Reply | None] = {}
        self._is_closed = False
        self._owner = Owner(_OPENING)

    @property
    def capacity_nbytes(self) -> int:
        return self._arena.nbytes

    @property
    def client_number(self) -> int:
        return _CLIENT

    def block(self, handle: Handle) -> memoryview:
        self._owner.check()
        if handle.segment != self._segment:
            raise StoreRestarted("the handle is of another store")
        return self._arena.block(handle.offset, handle.nbytes)

    def close(self) -> None:
        with self._changed:
            if not self._is_closed:
                os.close(self._fd)
            self._is_closed = True
            self._changed.notify_all()
        self._arena.close()

    def __reduce__(self) -> NoReturn:
        self._owner.refuse_pickle()

    def _exchange(self, request: Request[Any], timeout_s: float | None) -> Reply:
        self._owner.check()
        seq = request.seq
        try:
            request = decode(request_decoder, encode(request))  # as strict as a daemon
        except FormatError as error:
            return refusal(seq, error)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._release_dropped_pins()
        with self._changed:
            if self._is_closed:
                raise StoreUnavailable("the store has been closed")
            self._replies[seq] = None
            try:
                self._deliver(self._state.handle(_CLIENT, request, now_s=time.monotonic()))
                while (reply := self._replies[seq]) is None:
                    left = None if deadline is None else deadline - time.monotonic()
                    if self._is_closed:
                        raise StoreUnavailable("the store has been closed")
                    if left is not None and left <= 0:
                        raise DeadlineExceeded("the store did not answer in time")
                    # No thread reacts to collected views, so each waiting call polls for them.
                    self._changed.wait(min(left or _LOOK_AGAIN_S, _LOOK_AGAIN_S))
                    self._release_dropped_pins()
            finally:
                del self._replies[seq]
        return reply

    def _tell(self, request: Request[Any]) -> None:
        with self._changed:
            if not self._is_closed:
                self._deliver(self._state.handle(_CLIENT, request, now_s=time.monotonic()))

    def _deliver(self, replies: Replies) -> None:
        for _, reply in replies:
            if reply.seq in self._replies:  # else the caller has timed out
                self._replies[reply.seq] = reply
        self._changed.notify_all()
