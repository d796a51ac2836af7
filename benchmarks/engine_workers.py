"""An engine's core and its worker processes, with handles and baselines, for `handoff` and
`images`.

The baselines hand tensors over as today's engines do:

- pickled through a pipe to each worker, as `multiprocessing` queues do (LMDeploy's API process to
  its engine);
- as messages with the tensors out of band, through ZMQ to each worker (vLLM, for data that are too
  large for its ring; SGLang's processes);
- through a ring in shared memory from which each worker copies (vLLM, for all other data).

All are the best of their kind: the data are encoded once for all workers, numpy replaces torch, and
all workers are woken at once by the same small message as on our side. A worker then views the
arena itself, or its own copy in a baseline. To read all bytes costs the same on both sides.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from afferent.errors import WorkerDied
from afferent.media.workers.launch import THREAD_ENV
from afferent.runtime import wire
from afferent.runtime.sockets import new_address
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.types import Handle, decode, encode
from benchmarks.controls import tensor_message
from benchmarks.controls.ring import Ring
from benchmarks.controls.sockets import load_zmq
from benchmarks.engine_worker import NUM_CHUNKS, REQUEST, Order, Settings

Trees = Sequence[dict[str, Any]]

_START_TIMEOUT_S = 60.0
_seen_decoder = msgspec.msgpack.Decoder(int)


class EngineWorkers:
    """The workers; each method awaits all answers: the bytes that each worker sees."""

    def __init__(
        self, store: AsyncDaemonStore, context: Any, *, number: int, ring_chunk_nbytes: int
    ) -> None:
        """Prepare the workers; ``context`` is ZMQ's."""
        self._store, self._context = store, context
        self._number, self._ring_chunk_nbytes = number, ring_chunk_nbytes
        self._ring: Ring | None = None
        self._client_numbers: list[int] = []
        self._channels: list[wire.AsyncChannel] = []
        self._pipes: list[Connection] = []
        self._zmq_sockets: list[Any] = []
        self._answers: list[int] = []
        self._answered: asyncio.Future[None] | None = None

    async def ping(self) -> list[int]:
        """Send an empty message to each worker and await the answers: the lower bound."""
        return await self._order(Order("ping"))

    async def view(self, handles: Sequence[Handle]) -> list[int]:
        """Pin for all workers in one round trip, and send them the handles."""
        await self._store.get(REQUEST, handles, also_for=self._client_numbers)
        return await self._order(Order("view", list(handles)))

    async def let_go(self) -> None:
        await self._order(Order("let_go"))
        await self._store.release(REQUEST)

    async def send_through_pipes(self, trees: Trees) -> list[int]:
        """Send the tensors pickled through pipes."""
        answered = self._begin(Order("pipe"))
        await asyncio.sleep(0)  # send the orders before the loop is blocked
        data = pickle.dumps(trees, protocol=pickle.HIGHEST_PROTOCOL)
        for pipe in self._pipes:
            pipe.send_bytes(data)
        return await self._end(answered)

    async def send_through_zmq(self, trees: Trees) -> list[int]:
        """Send the tensors out of band through ZMQ."""
        answered = self._begin(Order("zmq"))
        parts = tensor_message.encode(trees)
        for sender in self._zmq_sockets:
            sender.send_multipart(parts, copy=False)
        return await self._end(answered)

    async def send_through_ring(self, trees: Trees) -> list[int]:
        """Send the tensors through the ring."""
        if self._ring is not None:
            self._ring.write(tensor_message.encode(trees))
        return await self._order(Order("ring"))

    def start(self, address: str, stack: ExitStack) -> list[socket.socket]:
        """Start the processes; return our ends of their channels."""
        ring_fd = os.memfd_create("ring")
        try:
            self._ring = Ring(
                ring_fd,
                num_chunks=NUM_CHUNKS,
                chunk_nbytes=self._ring_chunk_nbytes,
                num_readers=self._number,
            )
            return [
                self._start_one(address, index, ring_fd, stack) for index in range(self._number)
            ]
        finally:
            os.close(ring_fd)

    async def attach(self, socks: Sequence[socket.socket]) -> None:
        """Wait until all of them are ready."""
        self._answered = asyncio.get_running_loop().create_future()
        self._channels = [wire.AsyncChannel(self._on_frame, self._on_close) for _ in socks]
        for channel, sock in zip(self._channels, socks, strict=True):
            await channel.attach(sock)
        answers = self._end(self._answered)
        self._client_numbers = await asyncio.wait_for(answers, _START_TIMEOUT_S)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
        await self._store.close()

    # Inner steps

    async def _order(self, order: Order) -> list[int]:
        return await self._end(self._begin(order))

    def _begin(self, order: Order) -> asyncio.Future[None]:
        self._answers = []
        self._answered = asyncio.get_running_loop().create_future()
        frame = encode(order)
        for channel in self._channels:
            channel.send(frame)
        return self._answered

    async def _end(self, answered: asyncio.Future[None]) -> list[int]:
        await answered
        return self._answers

    def _on_frame(self, frame: bytes) -> None:
        self._answers.append(decode(_seen_decoder, frame))
        if len(self._answers) == len(self._channels) and self._answered is not None:
            self._answered.set_result(None)

    def _on_close(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(WorkerDied("a worker of the benchmark has ended"))

    def _start_one(self, address: str, index: int, ring_fd: int, stack: ExitStack) -> socket.socket:
        near, far = socket.socketpair()
        read_fd, write_fd = os.pipe()
        settings = Settings(
            store_address=address,
            channel_fd=far.fileno(),
            pipe_fd=read_fd,
            zmq_address=self._bind_zmq(stack),
            ring_fd=ring_fd,
            ring_chunk_nbytes=self._ring_chunk_nbytes,
            num_workers=self._number,
            index=index,
        )
        command = [sys.executable, "-m", "benchmarks.engine_worker"]
        command.append(msgspec.json.encode(settings).decode())
        fds, env = (far.fileno(), read_fd, ring_fd), {**os.environ, **THREAD_ENV}
        child = subprocess.Popen(command, pass_fds=fds, env=env)
        stack.callback(_kill, child)
        far.close()
        os.close(read_fd)
        self._pipes.append(stack.enter_context(Connection(write_fd, readable=False)))
        return near

    def _bind_zmq(self, stack: ExitStack) -> str:
        sender = stack.enter_context(self._context.socket(load_zmq().PAIR))
        sender.linger = 0
        sender.bind(f"ipc://{new_address('bench')}")
        self._zmq_sockets.append(sender)
        return str(sender.last_endpoint.decode())


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()


@asynccontextmanager
async def engine_workers(
    address: str, number: int, *, ring_chunk_nbytes: int
) -> AsyncIterator[EngineWorkers]:
    """Run workers with the arena in their page tables; yield them when they are ready.

    Args:
        ring_chunk_nbytes: The maximal size of a message through the ring.

    Raises:
        ConfigError: pyzmq is missing.
    """
    with load_zmq().Context() as context, ExitStack() as stack:
        store = await AsyncDaemonStore.connect(address, name="bench core")
        workers = EngineWorkers(store, context, number=number, ring_chunk_nbytes=ring_chunk_nbytes)
        try:
            await workers.attach(workers.start(address, stack))
            yield workers
        finally:
            await workers.close()
