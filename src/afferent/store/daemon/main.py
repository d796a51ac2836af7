"""Store daemon: the one process that owns the store's state. It moves no payload.

python -m afferent.store.daemon.main FD      (started by a supervisor, or by `StoreServer`)

A daemon that takes over the arena of a dead daemon begins a new, empty epoch. It accepts no client
until every client of the previous epoch has died or reported that it uses nothing of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import time
from dataclasses import dataclass
from functools import partial

import uvloop

from afferent.errors import (
    AfferentError,
    ConnectionClosed,
    FormatError,
    StoreFull,
    VersionMismatch,
)
from afferent.runtime import logs, wire
from afferent.runtime.process import ChildProcess, run_until_terminated
from afferent.store import segment
from afferent.store.backing import Backing
from afferent.store.daemon.client_table import ClientTable, Entry
from afferent.store.daemon.launch import DaemonSettings
from afferent.store.protocol.hello import (
    VERSION,
    Bye,
    Hello,
    Welcome,
    client_mismatch,
    read_hello,
)
from afferent.store.protocol.replies import refusal, request_decoder, seq_of
from afferent.store.state.machine import Replies, StoreState
from afferent.types import ClientId, decode, encode

log = logging.getLogger(__name__)

_HELLO_TIMEOUT_S = 5.0
_AWAKE_S = 60e-6
_MOST_MISSES = 6
_LOOK_AGAIN_S = 0.5
_LEAST_PAUSE_S = 0.005


@dataclass(frozen=True, slots=True, eq=False)
class _Client:
    """Process that maps the arena; ``pidfd`` reports its death."""

    token: int
    pidfd: int
    channel: wire.AsyncChannel


class StoreDaemon:
    """Serves one `StoreState` over a listening unix socket.

    Invariants:
        - No client gets the arena while ``_former`` has entries.
        - Each client is in the client table before it gets the arena's descriptor.
    """

    def __init__(self, settings: DaemonSettings) -> None:
        self._settings = settings
        self._read_only_fd = segment.reopen_read_only(settings.arena_fd)
        capacity_nbytes = os.fstat(settings.arena_fd).st_size
        self._backing = Backing(settings.arena_fd, ahead=True)
        self.state = StoreState(
            capacity_nbytes,
            segment=settings.segment,
            shares=settings.shares,
            back=self._backing.back,
        )
        self._client_table = ClientTable(settings.client_table_fd)
        self._former: dict[Entry, int] = {}  # pidfds of clients of the previous epoch
        self._recovered = asyncio.Event()
        self._clients: dict[ClientId, _Client] = {}
        self._greetings: set[asyncio.Task[None]] = set()
        self._awake_until_s, self._is_spinning = 0.0, False
        self._num_looks = self._num_misses = self._num_blind = 0
        self._seldom = logs.Seldom(log)

    async def serve(self, listener: socket.socket) -> None:
        """Accept clients until cancelled."""
        self._backing.prepare(region.start for region in self.state.objects.regions.values())
        for entry in self._client_table:
            self._await_former(entry)
        self._check_recovered()
        async for sock, peer in wire.accept_peers(listener):
            task = asyncio.create_task(self._greet(sock, peer))
            self._greetings.add(task)
            task.add_done_callback(self._greetings.discard)

    # Recovery

    def _await_former(self, entry: Entry) -> None:
        """Wait for a client of the previous epoch, unless it is dead."""
        pidfd = entry.open_pidfd()
        if pidfd is None:
            self._client_table.remove(entry.client)
            return
        self._former[entry] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._former_is_done, entry)

    def _former_is_done(self, entry: Entry) -> None:
        """Forget a client of the previous epoch that is dead, or uses nothing of it."""
        pidfd = self._former.pop(entry)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self._client_table.remove(entry.client)
        self._check_recovered()

    def _check_recovered(self) -> None:
        if not self._former:
            self._recovered.set()

    async def end_recovery(self) -> None:
        """Log the clients of the previous epoch after the timeout, and kill them if one is set."""
        timeout_s = self._settings.recovery_timeout_s
        try:
            await asyncio.wait_for(self._recovered.wait(), timeout_s or 5.0)
        except TimeoutError:
            for entry, pidfd in self._former.items():
                log.warning(
                    "a process still uses the arena as it was before the restart",
                    extra={"pid": entry.pid, "killed": timeout_s is not None},
                )
                if timeout_s is not None:
                    _kill(pidfd)

    # Clients

    async def _greet(self, sock: socket.socket, peer: wire.Peer) -> None:
        """Receive the hello of a connection and accept the client."""
        try:
            try:
                async with asyncio.timeout(_HELLO_TIMEOUT_S):
                    hello = await _receive_hello(sock)
            except ConnectionClosed:  # its process has ended, as at the end of a server
                sock.close()
                return
            except VersionMismatch as error:
                self._seldom.warning(error.message, code=error.code, pid=peer.pid)
                self._turn_away(sock)  # the answer contains this daemon's version
                return
            self._forget(hello.token)
            if isinstance(hello, Bye):
                self._turn_away(sock)
                return
            if await self._until_recovered(sock):
                await self._let_in(sock, peer, hello)
            else:  # it connects again
                sock.close()
        except ConnectionError:  # likewise
            sock.close()
        except (AfferentError, TimeoutError, OSError) as error:
            self._seldom.warning("a connection was refused", reason=type(error).__name__)
            sock.close()

    def _turn_away(self, sock: socket.socket) -> None:
        """Answer without the arena, and close."""
        sock.send(wire.pack_frame(encode(Welcome(VERSION, self._settings.segment, 0))))
        sock.close()

    def _forget(self, token: int) -> None:
        """Release the earlier connections of a client, which uses nothing of them."""
        for client in [c for c, known in self._clients.items() if known.token == token]:
            self._let_go(client)
        for entry in [entry for entry in self._former if entry.token == token]:
            self._former_is_done(entry)

    async def _until_recovered(self, sock: socket.socket) -> bool:
        """Wait until the previous epoch has ended; return whether the client has waited, too."""
        if self._recovered.is_set():
            return True
        heard = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(sock, 1))
        recovered = asyncio.ensure_future(self._recovered.wait())
        await asyncio.wait((heard, recovered), return_when=asyncio.FIRST_COMPLETED)
        recovered.cancel()
        is_waiting = heard.cancel()
        await asyncio.wait((heard,))
        return is_waiting

    async def _let_in(self, sock: socket.socket, peer: wire.Peer, hello: Hello) -> None:
        """Send a client the arena's descriptor, and serve it."""
        client, pidfd = self._client_table.new_client(), wire.open_peer_pidfd(sock, peer)
        try:
            self._client_table.add(client, peer.pid, hello.token)
        except StoreFull:
            os.close(pidfd)
            raise
        channel = wire.AsyncChannel(partial(self._on_frame, client), partial(self._on_end, client))
        self._clients[client] = _Client(hello.token, pidfd, channel)
        asyncio.get_running_loop().add_reader(pidfd, self._let_go, client)
        self.state.connect(client, name=hello.name, pid=peer.pid)
        fd = self._settings.arena_fd if hello.writable else self._read_only_fd
        welcome = Welcome(VERSION, self._settings.segment, client)
        try:
            socket.send_fds(sock, [wire.pack_frame(encode(welcome))], [fd])
            await channel.attach(sock)
        except OSError:
            self._let_go(client)  # it disconnected before it got the arena
            raise
        if client not in self._clients:  # it has died meanwhile
            channel.abort()

    def _on_frame(self, client: ClientId, frame: bytes) -> None:
        self._stay_awake()
        try:
            request = decode(request_decoder, frame)
        except FormatError as error:
            # One invalid call must not cost the process all its pins.
            self._send([(client, refusal(seq_of(frame), error))])
        else:
            self._send(self.state.handle(client, request, now_s=time.monotonic()))

    def _on_end(self, client: ClientId) -> None:
        """Handle the end of a connection; its process's pins stay until it has died."""
        if client not in self._clients:  # `_let_go` ended the connection
            return
        self._send(self.state.disconnect(client, now_s=time.monotonic()))
        if not self.state.holds_anything(client):
            self._let_go(client)

    def _stay_awake(self) -> None:
        """Poll for the next message for a moment.

        Requests come in groups, and a wakeup may take longer than an answer. After polls without a
        message, polling pauses with exponential backoff: there it only costs time.
        """
        if self._num_looks:  # this message came while polling
            self._num_misses = 0
        elif self._num_blind and not self._is_spinning:
            self._num_blind -= 1
            return
        self._num_looks, self._awake_until_s = 0, time.monotonic() + _AWAKE_S
        if not self._is_spinning:
            self._is_spinning = True
            asyncio.get_running_loop().call_soon(self._spin)

    def _spin(self) -> None:
        self._is_spinning = time.monotonic() < self._awake_until_s
        if self._is_spinning:
            self._num_looks += 1
            asyncio.get_running_loop().call_soon(self._spin)
            return
        self._num_looks = 0
        self._num_misses = min(self._num_misses + 1, _MOST_MISSES)
        self._num_blind = (1 << self._num_misses) - 1

    def _let_go(self, client: ClientId) -> None:
        """Remove a client that has died, or uses nothing any more."""
        known = self._clients.pop(client, None)
        if known is None:
            return
        asyncio.get_running_loop().remove_reader(known.pidfd)
        os.close(known.pidfd)
        known.channel.abort()
        self._client_table.remove(client)
        self._send(self.state.client_died(client, now_s=time.monotonic()))

    async def end_overdue_workers(self) -> None:
        """Kill workers that hang; other workers get their jobs, and the pool replaces them."""
        timeout_s, fetch_timeout_s = self._settings.job_timeout_s, self._settings.fetch_timeout_s
        shortest_s, jobs = min(timeout_s, fetch_timeout_s), self.state.flights.jobs
        while True:
            now_s = time.monotonic()
            overdue = jobs.overdue(
                now_s=now_s, timeout_s=timeout_s, fetch_timeout_s=fetch_timeout_s
            )
            for client in overdue:
                log.warning("a worker took too long over an item and is killed")
                _kill(self._clients[client].pidfd)
            next_s = jobs.next_overdue_s(timeout_s=timeout_s, fetch_timeout_s=fetch_timeout_s)
            # A job that is taken meanwhile can't be overdue before the shortest timeout.
            pause_s = shortest_s / 10.0 if overdue else max(next_s - now_s, _LEAST_PAUSE_S)
            await asyncio.sleep(min(pause_s, shortest_s))

    async def look_again_for_memory(self) -> None:
        """Retry the requests that wait for space, after a chunk was refused."""
        while True:
            await asyncio.sleep(_LOOK_AGAIN_S)
            if self._backing.has_refused:
                self._send(self.state.look_again(now_s=time.monotonic()))

    def _send(self, replies: Replies) -> None:
        for client, reply in replies:
            known = self._clients.get(client)
            if known is not None and known.channel.is_open:
                known.channel.send(encode(reply))


async def _receive_hello(sock: socket.socket) -> Hello | Bye:
    """Receive the first message of a client.

    Raises:
        ConnectionClosed: The client has left.
        VersionMismatch: The client speaks another version of the protocol, or another protocol.
        FormatError: The message does not follow this version's schema.
    """
    try:
        frame = await wire.receive_frame(sock)
    except FormatError:
        raise client_mismatch(None) from None
    return read_hello(frame)


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _allow_many_descriptors() -> None:
    """Raise the descriptor limit: each client needs two, and the soft limit may be 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _run(child: ChildProcess, settings: DaemonSettings) -> None:
    _allow_many_descriptors()
    listener = socket.socket(fileno=settings.listener_fd)
    daemon = StoreDaemon(settings)
    capacity = daemon.state.objects.capacity_nbytes
    # Objects live long and have no cycles: collecting would cost a tenth of the time.
    gc.set_threshold(50_000)
    child.report(f"an arena of {capacity / 2**20:,.0f} MiB", ready=True)
    await run_until_terminated(
        daemon.serve(listener),
        daemon.end_overdue_workers(),
        daemon.end_recovery(),
        daemon.look_again_for_memory(),
        child.keep_beating(),
    )


def main() -> None:
    child = ChildProcess.start()
    uvloop.run(_run(child, child.settings(DaemonSettings)))


if __name__ == "__main__":
    main()
