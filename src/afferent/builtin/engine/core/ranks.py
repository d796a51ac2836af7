"""Group of workers, as the core sees it.

Workers start together, do every step together, and end together: the results of one worker are
useless without the others. A new group has new workers, and no message of an old worker reaches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass

from afferent.builtin.engine import messages as m
from afferent.engines.protocol import EngineInfo
from afferent.errors import ConnectionClosed, FormatError, InternalError, WorkerDied
from afferent.runtime import wire
from afferent.types import encode

log = logging.getLogger(__name__)

_GRACE_S = 1.0
"""Time for a worker to notice its cut connection, before it is killed."""


@dataclass(slots=True, eq=False)
class _Rank:
    peer: wire.Peer
    pidfd: int
    channel: wire.AsyncChannel
    port: int
    ready: m.WorkerReady | None = None
    client: int = 0
    done: m.WorkDone | None = None


class Ranks:
    """Workers join until there are ``size`` of them; the first loss ends all.

    Invariants:
        - Each rank joins once.
        - One `Work` is pending at a time; its answers have its number.
        - After `end`, no worker is used again, and each is killed after `_GRACE_S`.
    """

    def __init__(
        self,
        size: int,
        *,
        step_timeout_s: float,
        on_ready: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        """Create a group without workers.

        Args:
            on_ready: Called once all workers have loaded the model.
            on_end: Called when one is lost.
        """
        self._size, self._step_timeout_s = size, step_timeout_s
        self._on_ready, self._on_end = on_ready, on_end
        self._ranks: dict[int, _Rank] = {}
        self._has_ended = False
        self._number = 0
        self._answered: asyncio.Future[None] | None = None

    # Questions

    @property
    def has_ended(self) -> bool:
        return self._has_ended

    @property
    def is_ready(self) -> bool:
        ready = [rank for rank in self._ranks.values() if rank.ready is not None]
        return len(ready) == self._size and not self._has_ended

    @property
    def may_differ(self) -> bool:
        """Whether one worker may fail where others succeed."""
        return self._size > 1

    def __contains__(self, rank: int) -> bool:
        return rank in self._ranks

    @property
    def clients(self) -> list[int]:
        """Ids of the workers in the store."""
        return [rank.client for rank in self._ranks.values()]

    @property
    def pid(self) -> int:
        """Pid of the first worker."""
        return self._ranks[0].peer.pid

    @property
    def info(self) -> EngineInfo:
        return self._first.info

    @property
    def weights(self) -> bytes:
        """The digest of the model's weights; empty if no embeddings are shared."""
        return self._first.weights

    @property
    def _first(self) -> m.WorkerReady:
        ready = self._ranks[0].ready if 0 in self._ranks else None
        if ready is None:
            raise InternalError("the first worker is not ready")
        return ready

    # Events

    def join(
        self,
        hello: m.WorkerHello,
        channel: wire.AsyncChannel,
        sock: socket.socket,
        peer: wire.Peer,
    ) -> None:
        """Add a worker; the last one triggers the order to all workers to load the model.

        Raises:
            FormatError: The rank does not exist, or is taken; or the worker has died meanwhile.
        """
        if hello.rank >= self._size or hello.rank in self._ranks:
            raise FormatError("a worker has a rank that is none, or taken")
        try:
            pidfd = wire.open_peer_pidfd(sock, peer)
        except ProcessLookupError as error:
            raise FormatError("a worker has died as soon as it had come") from error
        self._ranks[hello.rank] = _Rank(peer, pidfd, channel, hello.port)
        if len(self._ranks) == self._size:
            self._broadcast(m.Rendezvous(self._ranks[0].port))

    def set_ready(self, rank: int, ready: m.WorkerReady) -> None:
        """Record that a worker has loaded the model.

        Raises:
            FormatError: It has reported this before.
        """
        if self._ranks[rank].ready is not None:
            raise FormatError("a worker is ready twice")
        self._ranks[rank].ready, self._ranks[rank].client = ready, ready.client
        if self.is_ready:
            self._on_ready()

    def set_done(self, rank: int, done: m.WorkDone) -> None:
        if done.number != self._number or self._answered is None:
            raise FormatError("a worker has done what it was not told")
        self._ranks[rank].done, self._ranks[rank].client = done, done.client
        answered = all(rank.done is not None for rank in self._ranks.values())
        if answered and not self._answered.done():
            self._answered.set_result(None)

    # Work

    async def do(self, work: m.Work) -> list[m.WorkDone]:
        """Send work to all workers; return their answers by rank. One call at a time.

        Raises:
            WorkerDied: One of them is lost, or took too long; all of them are ended.
        """
        if self._has_ended:
            raise WorkerDied("the engine's worker died; try again")
        self._number = work.number
        for rank in self._ranks.values():
            rank.done = None
        self._answered = asyncio.get_running_loop().create_future()
        self._broadcast(work)
        try:
            async with asyncio.timeout(self._step_timeout_s):
                await self._answered
        except TimeoutError:
            late = [number for number, rank in self._ranks.items() if rank.done is None]
            log.error("workers took too long for a step", extra={"ranks": str(late)})  # noqa: TRY400
            self.end()
            raise WorkerDied("the engine took too long for a step; try again") from None
        finally:
            self._answered = None
        return [rank.done for _, rank in sorted(self._ranks.items()) if rank.done is not None]

    def end(self) -> None:
        """Cut the connections of all workers, and kill those that do not end by themselves."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(WorkerDied("the engine's worker died; try again"))
        for rank in self._ranks.values():
            rank.channel.abort()
            asyncio.get_running_loop().call_later(_GRACE_S, _kill, rank.pidfd)
        self._on_end()

    # Inner steps

    def _broadcast(self, message: m.ToWorker) -> None:
        payload = encode(message)
        for rank in self._ranks.values():
            # The loss of a worker ends the group soon.
            with contextlib.suppress(ConnectionClosed):
                rank.channel.send(payload, max_nbytes=m.MAX_WORK_NBYTES)


def _kill(pidfd: int) -> None:
    """Kill a process by its descriptor: its pid may be another process's by now."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
