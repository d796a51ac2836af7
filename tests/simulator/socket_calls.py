"""Stand-in for `socket`: sockets of a simulated machine, blocking or not."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, cast

from tests.simulator import sockets, threads
from tests.simulator.descriptors import Memory, Pidfd, ReadOnly
from tests.simulator.machine import Process
from tests.simulator.sockets import End, Listener
from tests.simulator.threads import TIMED_OUT
from tests.simulator.watching import Watched

UID = 1000
_SO_PEERPIDFD = 77
_SPIN_S = 60e-6


def calling() -> Process:
    """Return the calling process.

    Raises:
        Killed: It is dead.
    """
    process = threads.current().process
    process.system_call()
    return process


def wait_readable(watched: Watched, timeout_s: float | None) -> bool:
    """Let others run until ``watched`` is readable; return whether it is."""
    me = threads.current()
    if watched.is_readable:
        return True
    turn = me.turn
    number = watched.watch(lambda: me.wake(turn))
    try:
        return me.wait(timeout_s) is not TIMED_OUT
    finally:
        watched.unwatch(number)


class Socket:
    """Stand-in for `socket.socket`, for unix stream sockets."""

    def __init__(
        self, family: int = 0, type: int = 0, proto: int = 0, fileno: int | None = None
    ) -> None:
        self._process = calling()
        self._fd = -1 if fileno is None else fileno
        self._timeout_s: float | None = None

    @classmethod
    def over(cls, process: Process, what: Any) -> Socket:
        """Return a socket over an existing object, with a new descriptor."""
        return cls(fileno=process.machine.new_fd(process, what))

    @property
    def what(self) -> Any:
        """Object behind the descriptor.

        Raises:
            OSError: It is closed, or was never open.
        """
        found = self._process.fds.get(self._fd)
        if found is None:
            raise OSError(9, "bad file descriptor")
        return found

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, flag: bool) -> None:
        self._timeout_s = None if flag else 0.0

    def settimeout(self, timeout: float | None) -> None:
        self._timeout_s = timeout

    def gettimeout(self) -> float | None:
        return self._timeout_s

    def connect(self, path: str) -> None:
        process = calling()
        if (failure := process.machine.fails("connect", process)) is not None:
            raise failure
        end = sockets.connect(process.machine, process, path)
        end.peer.peer_process = process
        self._fd = process.machine.new_fd(process, end)
        threads.current().take_time()

    def accept(self) -> tuple[Socket, str]:
        listener = cast(Listener, self.what)
        if not listener.backlog:
            raise BlockingIOError(11, "would block")
        process = calling()
        if (failure := process.machine.fails("accept", process)) is not None:
            raise failure
        end = listener.backlog.popleft()
        end.num_open, end.name = 0, process.name
        return Socket.over(process, end), ""

    def getsockopt(self, level: int, option: int, nbytes: int = 0) -> Any:
        process, end = calling(), cast(End, self.what)
        peer = end.peer_process
        if option == _SO_PEERPIDFD:
            if not process.machine.has_peer_pidfds:
                raise OSError(92, "no such option")
            if peer is None or process.machine.processes.get(peer.pid) is not peer:
                raise ProcessLookupError(3, "no such process")
            return process.machine.new_fd(process, Pidfd(peer))
        return struct.pack("3i", 1 if peer is None else peer.pid, UID, UID)

    def send(self, data: bytes, extra: tuple[Any, ...] = ()) -> int:
        calling()
        sent = cast(End, self.what).write(data, extra)
        if not sent:
            raise BlockingIOError(11, "would block")
        return sent

    def sendall(self, data: bytes) -> None:
        me = threads.current()
        me.take_time()
        end = cast(End, self.what)
        until_s = (
            None
            if self._timeout_s is None
            else threads.current().process.monotonic_s + self._timeout_s
        )
        while True:
            data = data[end.write(data) :]
            if not data:
                return
            left_s = None if until_s is None else until_s - threads.current().process.monotonic_s
            if left_s is not None and left_s <= 0:
                raise TimeoutError("timed out")
            turn = me.turn
            number = end.watch(lambda turn=turn: me.wake(turn))  # type: ignore[misc]
            try:
                me.wait(left_s)
            finally:
                end.unwatch(number)

    def recv(self, nbytes: int) -> bytes:
        return self._receive(nbytes)[0]

    def _receive(self, nbytes: int) -> sockets.Chunk:
        me = threads.current()
        me.process.system_call()
        until_s = (
            None
            if self._timeout_s is None
            else threads.current().process.monotonic_s + self._timeout_s
        )
        while True:
            end = cast(End, self.what)
            found = end.read(nbytes)
            if found is not None:
                return found
            if self._timeout_s == 0.0:
                me.take_time(_SPIN_S)
                raise BlockingIOError(11, "would block")
            left_s = None if until_s is None else until_s - threads.current().process.monotonic_s
            if left_s is not None and left_s <= 0:
                raise TimeoutError("timed out")
            wait_readable(end, left_s)

    def shutdown(self, how: int) -> None:
        calling()
        cast(End, self.what).shut()

    def close(self) -> None:
        process = calling()
        if self._fd in process.fds:
            process.machine.close_fd(self._fd)
        self._fd = -1

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def send_fds(sock: Socket, buffers: Sequence[bytes], fds: Sequence[int]) -> int:
    process = calling()
    things, to = tuple(process.fds[fd] for fd in fds), cast(End, sock.what).peer_process
    for each in things:
        memory = each.memory if isinstance(each, ReadOnly) else each
        if isinstance(memory, Memory) and memory.on_sent is not None and to is not None:
            memory.on_sent(to)
    return sock.send(b"".join(buffers), things)


def recv_fds(
    sock: Socket, nbytes: int, max_fds: int, flags: int = 0
) -> tuple[bytes, list[int], int, None]:
    process = calling()
    data, extra = sock._receive(nbytes)
    if extra and process.machine.fails("recv_fds", process) is not None:
        extra = ()  # too many open files
    return data, [process.machine.new_fd(process, each) for each in extra], 0, None


def listen(process: Process, path: str) -> int:
    """Return a descriptor of a listening socket."""
    return process.machine.new_fd(process, Listener(process.machine, path))
