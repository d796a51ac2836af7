"""A worker of an engine, as far as features come to it: for `afferent.bench.engine_workers`.

    python -m afferent.bench.engine_worker ADDRESS CHANNEL_FD PIPE_FD ZMQ_ADDRESS

It says its number at the store, then does an `Order` at a time, and answers with how many bytes of
tensors it sees now. Those that came by pickle it drops before it answers: eight workers with copies
of their own would not fit into the memory of a small machine.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import sys
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct

from afferent import wire
from afferent.store import codec
from afferent.store.client import DaemonStore
from afferent.types import Handle, decode, encode

REQUEST = "bench"


class Order(Struct, array_like=True):
    """``view`` looks at objects that have been pinned for this worker; ``pipe`` and ``zmq`` receive
    what comes by the other ways; ``ping`` does nothing.
    """

    what: Literal["ping", "view", "let_go", "pipe", "zmq"]
    handles: list[Handle] = []


class _Worker:
    def __init__(self, store: DaemonStore, pipe: Connection, zmq_socket: Any) -> None:
        self._store, self._pipe, self._zmq_socket = store, pipe, zmq_socket
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
                head, *buffers = self._zmq_socket.recv_multipart(copy=False)
                trees = pickle.loads(head.buffer, buffers=[b.buffer for b in buffers])  # noqa: S301
                return sum(map(_nbytes, trees))
        return 0


def _nbytes(tree: dict[str, Any]) -> int:
    return sum(value.nbytes for value in tree.values() if isinstance(value, np.ndarray))


def _connect_zmq(address: str) -> Any:
    if not address:
        return None
    import zmq

    receiver: Any = zmq.Context.instance().socket(zmq.PAIR)
    receiver.connect(address)
    return receiver


def _serve(channel: wire.SyncChannel, work: Callable[[Order], int]) -> None:
    decoder = msgspec.msgpack.Decoder(Order)
    while True:
        order = decode(decoder, channel.receive(timeout_s=None))
        channel.send(encode(work(order)), timeout_s=None)


def main(arguments: Iterable[str]) -> None:
    address, channel_fd, pipe_fd, zmq_address = arguments
    channel = wire.SyncChannel(socket.socket(fileno=int(channel_fd)))
    pipe = Connection(int(pipe_fd), writable=False)
    with DaemonStore("\0" + address, name="bench worker") as store:
        store.wait_populated()
        worker = _Worker(store, pipe, _connect_zmq(zmq_address))
        channel.send(encode(store.client_number), timeout_s=None)
        with contextlib.suppress(wire.ConnectionClosed):  # the benchmark has ended
            _serve(channel, worker.do)


if __name__ == "__main__":
    main(sys.argv[1:])
