"""The store daemon: one process that knows where everything is. It moves no payload.

python -m afferent.store.daemon FD      (started by the supervisor)
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import time

from msgspec import Struct

from afferent import wire
from afferent.errors import FormatError
from afferent.process import ChildProcess, run_until_terminated
from afferent.store import arena
from afferent.store import messages as m
from afferent.store.objects import ClientId
from afferent.store.state import Replies, StoreState
from afferent.types import decode, encode

log = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 5.0


class Settings(Struct, kw_only=True, forbid_unknown_fields=True):
    arena_fd: int
    listener_fd: int
    segment: int
    job_timeout_s: float


class StoreDaemon:
    """Serves one `StoreState` over a listening unix socket."""

    def __init__(self, *, arena_fd: int, segment: int) -> None:
        self._arena_fd = arena_fd
        self._read_only_fd = arena.reopen_read_only(arena_fd)
        self.state = StoreState(os.fstat(arena_fd).st_size, segment=segment)
        self._channels: dict[ClientId, wire.AsyncChannel] = {}
        self._next_client = itertools.count(1)
        self._greetings: set[asyncio.Task[None]] = set()
        self._pidfds: dict[ClientId, int] = {}

    async def serve(self, listener: socket.socket) -> None:
        """Accept clients until cancelled."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(listener)
            task = asyncio.create_task(self._greet(sock))
            self._greetings.add(task)
            task.add_done_callback(self._greetings.discard)

    async def _greet(self, sock: socket.socket) -> None:
        """Check who connects, and give it the arena's descriptor."""
        try:
            peer = wire.check_peer(sock)
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                hello = await _receive_hello(sock)
            welcome = m.Welcome(m.VERSION, self.state.segment)
            if hello.version == m.VERSION:
                fd = self._arena_fd if hello.writable else self._read_only_fd
                socket.send_fds(sock, [wire.pack_frame(encode(welcome))], [fd])
            else:  # the client reads our version and says so
                sock.send(wire.pack_frame(encode(welcome)))
                sock.close()
                return
            await self._start_client(sock, peer, hello.name)
        except (wire.ConnectionClosed, FormatError, TimeoutError, OSError) as error:
            log.warning("a connection was refused", extra={"reason": type(error).__name__})
            sock.close()

    async def _start_client(self, sock: socket.socket, peer: wire.Peer, name: str) -> None:
        client = next(self._next_client)
        pidfd = wire.open_peer_pidfd(sock, peer)
        loop = asyncio.get_running_loop()

        def on_frame(frame: bytes) -> None:
            request: m.Request = decode(m.request_decoder, frame)
            self._send(self.state.handle(client, request, now_s=time.monotonic()))

        def on_close() -> None:
            self._channels.pop(client, None)
            self._send(self.state.disconnect(client, now_s=time.monotonic()))

        def on_death() -> None:
            loop.remove_reader(pidfd)
            os.close(self._pidfds.pop(client))
            if (channel := self._channels.pop(client, None)) is not None:
                channel.abort()
            self._send(self.state.client_died(client, now_s=time.monotonic()))
            log.debug("a client has died", extra={"client": name, "client_pid": peer.pid})

        self.state.connect(client)
        self._pidfds[client] = pidfd
        self._channels[client] = wire.AsyncChannel(on_frame, on_close)
        loop.add_reader(pidfd, on_death)
        await self._channels[client].attach(sock)

    async def end_overdue_workers(self, timeout_s: float) -> None:
        """Kill workers that hang; their death fails the job, and the pool replaces them."""
        while True:
            await asyncio.sleep(timeout_s / 10.0)
            for client in self.state.jobs.overdue(now_s=time.monotonic(), timeout_s=timeout_s):
                log.warning("a worker took too long over an item and is killed")
                signal.pidfd_send_signal(self._pidfds[client], signal.SIGKILL)

    def _send(self, replies: Replies) -> None:
        for client, reply in replies:
            channel = self._channels.get(client)
            if channel is not None and channel.is_open:
                channel.send(encode(reply))


async def _receive_hello(sock: socket.socket) -> m.Hello:
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    cutter = wire.FrameCutter(max_nbytes=4096)
    frames: list[bytes] = []
    while not frames:
        data = await loop.sock_recv(sock, 4096)
        if not data:
            raise wire.ConnectionClosed("the client left before it said hello")
        frames = list(cutter.feed(data))
    if len(frames) > 1:
        raise FormatError("a client waits for the welcome")
    return decode(m.hello_decoder, frames[0])


async def _run(child: ChildProcess, settings: Settings) -> None:
    listener = socket.socket(fileno=settings.listener_fd)
    daemon = StoreDaemon(arena_fd=settings.arena_fd, segment=settings.segment)
    capacity = daemon.state.objects.capacity_nbytes
    child.report(f"an arena of {capacity / 2**20:,.0f} MiB", ready=True)
    watching = daemon.end_overdue_workers(settings.job_timeout_s)
    await run_until_terminated(daemon.serve(listener), watching)


def main() -> None:
    child = ChildProcess.start()
    asyncio.run(_run(child, child.settings(Settings)))


if __name__ == "__main__":
    main()
