"""A cache server for a request's images, in its own process, with lists in each call.

    python -m benchmarks.peers.lightllm FD

LightLLM's newest version works like this. A server on a TCP socket without Nagle's delay has a
record of each item by md5, with its ids and its place in the order of use. A frontend allocates all
items of a request in one call. It asks for the ready ones in a second call, writes each of the
others into a segment of shared memory, and reports this in a third.

This server is faster than LightLLM's: it has no rpyc, which wraps each call in proxies and pickles
lists (here it is msgpack, with one write and one read on each side), no tracker process of Python's
`SharedMemory`, and no locks.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import os
import socket
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

_LENGTH = struct.Struct("<I")
_SHARED = Path("/dev/shm")  # noqa: S108  (the folder of shared memory segments)


class Call(Struct, array_like=True):
    """A call; ``digests`` and their numbers of tokens to allocate, or the ``ids`` of records."""

    what: Literal["allocate", "is_ready", "set_ready", "clear"]
    digests: list[str] = []
    num_tokens: list[int] = []
    ids: list[int] = []


class Record(Struct, array_like=True):
    id: int
    first_token: int
    num_tokens: int


@dataclass(slots=True)
class _Entry:
    record: Record
    is_ready: bool = False
    num_users: int = 0


class _Records:
    """The records of the server, the least recently used first."""

    def __init__(self) -> None:
        self._by_digest: OrderedDict[str, _Entry] = OrderedDict()
        self._by_id: dict[int, _Entry] = {}
        self._ids, self._next_token = itertools.count(), 1 << 20

    def do(self, call: Call) -> Any:
        match call.what:
            case "allocate":
                return list(map(self._allocate, call.digests, call.num_tokens))
            case "is_ready":
                return [self._by_id[number].is_ready for number in call.ids]
            case "set_ready":
                for number in call.ids:
                    self._by_id[number].is_ready = True
            case "clear":
                self._by_digest.clear()
                self._by_id.clear()
        return None

    def _allocate(self, digest: str, num_tokens: int) -> Record:
        entry = self._by_digest.get(digest)
        if entry is None:
            entry = _Entry(Record(next(self._ids), self._next_token, num_tokens))
            self._by_digest[digest] = self._by_id[entry.record.id] = entry
            self._next_token += num_tokens
        else:
            self._by_digest.move_to_end(digest)
        entry.num_users += 1
        return entry.record


class CacheClient:
    """A frontend's connection to the server."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._record_decoder = msgspec.msgpack.Decoder(list[Record])

    def allocate(self, digests: list[str], num_tokens: list[int]) -> list[Record]:
        answer = self._call(Call("allocate", digests=digests, num_tokens=num_tokens))
        return self._record_decoder.decode(answer)

    def store(self, records: Sequence[Record], media: Sequence[bytes]) -> list[Path]:
        """Write the missing data of these records; return the segments, for their removal."""
        ids = [record.id for record in records]
        is_ready = msgspec.msgpack.decode(self._call(Call("is_ready", ids=ids)))
        missing = [number for number, yes in enumerate(is_ready) if not yes]
        segments = [_write_segment(f"bench-{ids[index]}", media[index]) for index in missing]
        self._call(Call("set_ready", ids=[ids[index] for index in missing]))
        return segments

    def clear(self) -> None:
        self._call(Call("clear"))

    def _call(self, call: Call) -> bytes:
        _send(self._sock, msgspec.msgpack.encode(call))
        return _receive(self._sock)


def md5(data: bytes) -> str:
    """Return the server's key of an item: 128 bits in hexadecimal."""
    return hashlib.md5(data).hexdigest()  # noqa: S324


def _write_segment(name: str, data: bytes) -> Path:
    path = _SHARED / f"{name}-{os.getpid()}"
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.ftruncate(fd, len(data))
    with mmap.mmap(fd, len(data)) as segment:
        segment[:] = data
    os.close(fd)
    return path


def _send(sock: socket.socket, frame: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(frame)) + frame)


def _receive(sock: socket.socket) -> bytes:
    """Receive a message.

    Raises:
        ConnectionError: The other side has disconnected.
    """
    frame = bytearray()
    needed = _LENGTH.size
    while len(frame) < needed:
        if not (data := sock.recv(1 << 16)):
            raise ConnectionError("the other side has gone")
        frame += data
        if len(frame) >= _LENGTH.size:
            needed = _LENGTH.size + _LENGTH.unpack_from(frame)[0]
    return bytes(frame[_LENGTH.size :])


@contextlib.contextmanager
def cache_server() -> Iterator[CacheClient]:
    """Run a server; yield a connection to it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-m", "benchmarks.peers.lightllm"]
        command.append(str(listener.fileno()))
        child = subprocess.Popen(command, pass_fds=[listener.fileno()])
        try:
            with socket.create_connection(listener.getsockname()) as sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                client = CacheClient(sock)
                client.clear()  # answered when it is ready
                yield client
        finally:
            child.kill()
            child.wait()


def main() -> None:
    listener = socket.socket(fileno=int(sys.argv[1]))
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    decoder, records = msgspec.msgpack.Decoder(Call), _Records()
    with contextlib.suppress(ConnectionError):  # the benchmark has ended
        while True:
            answer = records.do(decoder.decode(_receive(sock)))
            _send(sock, msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main()
