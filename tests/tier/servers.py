"""A real Redis server for tests, and a faulty link to it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
import redis

from tests.ports import free_port

MUST_BE_THERE = "TESTS_NEED_REDIS"
_START_TIMEOUT_S = 20.0
_PIECE_NBYTES = 64 << 10


def server_program() -> str:
    """Return a Redis program; without one, skip the test, or fail where it is required."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    why = "no redis-server is installed (Debian: apt-get install redis-server)"
    if os.environ.get(MUST_BE_THERE):
        pytest.fail(why)
    pytest.skip(why)


class RedisServer:
    """A Redis server on a free port, which writes nothing to disk."""

    def __init__(self, *options: str, password: str = "", certificate: Path | None = None) -> None:
        """Configure it; ``certificate`` is a folder with a certificate, for TLS on ``tls_port``."""
        self._options, self._password = options, password
        self._program = server_program()
        self.port, self.tls_port = free_port(), 0
        if certificate is not None:
            self.tls_port = free_port()
            self._options += ("--tls-port", str(self.tls_port), "--tls-auth-clients", "no")
            for option, name in (("cert", "cert"), ("key", "key"), ("ca-cert", "cert")):
                self._options += (f"--tls-{option}-file", str(certificate / f"{name}.pem"))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="redis-")
        try:
            self.start()
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        self._folder.cleanup()

    @property
    def url(self) -> str:
        user = f":{self._password}@" if self._password else ""
        return f"redis://{user}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, password=self._password or None)

    def all_keys(self) -> list[bytes]:
        with self.client() as client:
            found: list[bytes] = client.keys("*")  # type: ignore[assignment]
        return found

    def start(self) -> None:
        command = [self._program, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--dir", self._folder.name]
        if self._password:
            command += ["--requirepass", self._password]
        self._process = subprocess.Popen(
            [*command, *self._options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                with self.client() as client:
                    client.ping()
            except (redis.ConnectionError, redis.exceptions.BusyLoadingError):
                assert self._process.poll() is None, "the server has ended"
                assert time.monotonic() < until_s, "the server does not start"
                time.sleep(0.01)
            else:
                return

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


Fault = Callable[[bytes], bytes | None]
"""Changes a piece on its way to the client; after ``None``, nothing arrives any more."""


class BadLink:
    """A proxy to a server; `fault` changes what new and old connections transfer."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.fault: Fault | None = None
        self._sockets: list[socket.socket] = []
        self._is_closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_closed = True
        _shut(self._listener)
        self.cut()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def cut(self) -> None:
        """Close all connections."""
        known, self._sockets = self._sockets, []
        for sock in known:
            _shut(sock)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target)
            except OSError:  # the server is dead, so close the client's connection, too
                _shut(client)
                continue
            self._sockets += [client, server]
            if self._is_closed:  # meanwhile
                self.cut()
            for source, sink, is_reply in ((client, server, False), (server, client, True)):
                threading.Thread(
                    target=self._carry, args=(source, sink, is_reply), daemon=True
                ).start()

    def _carry(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        try:
            while data := source.recv(_PIECE_NBYTES):
                fault = self.fault
                piece = fault(data) if is_reply and fault is not None else data
                if piece is None:  # half open: discard everything, but close nothing
                    while source.recv(_PIECE_NBYTES):
                        pass
                    return
                sink.sendall(piece)
        except OSError:
            pass
        _shut(sink)


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
