"""A worker of an engine that only receives features, for `benchmarks.engine_workers`.

    python -m benchmarks.engine_worker SETTINGS

It sends its client id at the store, then executes one `Order` at a time, and answers with the bytes
of tensors that it sees. It drops data from a pipe or a socket before it answers: eight workers with
copies would not fit into the memory of a small machine.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct

from afferent.errors import ConnectionClosed
from afferent.runtime import wire
from afferent.store.block import codec
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import Handle, decode, encode
from benchmarks.controls import tensor_message
from benchmarks.controls.ring import Ring, RingReader
from benchmarks.controls.sockets import load_zmq

REQUEST = "bench"
NUM_CHUNKS = 2


class Settings(Struct, kw_only=True, forbid_unknown_fields=True):
    """Descriptors, and the sources of the baselines' tensors; ``index`` is that of this worker."""

    store_address: str
    channel_fd: int
    pipe_fd: int
    zmq_address: str
    ring_fd: int
    ring_chunk_nbytes: int
    num_workers: int
    index: int


class Order(Struct, array_like=True):
    """A task for a worker.

    ``view`` views objects that are pinned for this worker; ``pipe``, ``zmq`` and ``ring`` receive
    data in these ways; ``ping`` does nothing.
    """

    what: Literal["ping", "view", "let_go", "pipe", "zmq", "ring"]
    handles: list[Handle] = []


class _Worker:
    def __init__(self, settings: Settings, store: DaemonStore) -> None:
        self._store = store
        self._pipe = Connection(settings.pipe_fd, writable=False)
        self._zmq_socket = _connect_zmq(settings.zmq_address)
        ring = Ring(
            settings.ring_fd,
            num_chunks=NUM_CHUNKS,
            chunk_nbytes=settings.ring_chunk_nbytes,
            num_readers=settings.num_workers,
        )
        self._ring = RingReader(ring, settings.index)
        self._seen: list[Any] = []

    def do(self, order: Order) -> int:
        match order.what:
            case "view":
                self._seen = [codec.view(self._store.block(handle)) for handle in order.handles]
                return sum(map(_nbytes, self._seen))
            case "let_go":
                self._seen = []
                self._store.release(REQUEST)
            case "pipe":
                return sum(map(_nbytes, pickle.loads(self._pipe.recv_bytes())))  # noqa: S301
            case "zmq":
                frames = self._zmq_socket.recv_multipart(copy=False)
                return sum(map(_nbytes, tensor_message.decode([f.buffer for f in frames])))
            case "ring":
                return sum(map(_nbytes, tensor_message.decode(self._ring.read())))
        return 0


def _nbytes(tree: dict[str, Any]) -> int:
    return sum(value.nbytes for value in tree.values() if isinstance(value, np.ndarray))


def _connect_zmq(address: str) -> Any:
    zmq = load_zmq()
    receiver: Any = zmq.Context.instance().socket(zmq.PAIR)
    receiver.connect(address)
    return receiver


def _serve(channel: wire.SyncChannel, work: Callable[[Order], int]) -> None:
    decoder = msgspec.msgpack.Decoder(Order)
    while True:
        order = decode(decoder, channel.receive(timeout_s=None))
        channel.send(encode(work(order)), timeout_s=None)


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    channel = wire.SyncChannel(socket.socket(fileno=settings.channel_fd))
    with DaemonStore(settings.store_address, name="bench worker") as store:
        store.wait_populated()
        worker = _Worker(settings, store)
        channel.send(encode(store.client_number), timeout_s=None)
        with contextlib.suppress(ConnectionClosed):  # the benchmark has ended
            _serve(channel, worker.do)


if __name__ == "__main__":
    main()
