"""An engine core in its own process, between a frontend and the workers, for `images`.

    python -m benchmarks.engine_core SETTINGS

A frontend sends it handles or, in the baselines, the tensors through ZMQ (as vLLM's API server
does). It answers when every worker has its arrays, with the number of bytes that each worker sees.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec
import uvloop
from msgspec import Struct

from afferent.errors import WorkerDied
from afferent.media.workers.launch import THREAD_ENV
from afferent.runtime import wire
from afferent.runtime.sockets import new_address
from afferent.types import Handle, decode, encode
from benchmarks.controls import tensor_message
from benchmarks.controls.sockets import load_zmq
from benchmarks.engine_workers import EngineWorkers, Trees, engine_workers

_START_TIMEOUT_S = 60.0
_seen_decoder = msgspec.msgpack.Decoder(list[int])


class Settings(Struct, kw_only=True, forbid_unknown_fields=True):
    store_address: str
    channel_fd: int
    zmq_address: str
    num_workers: int
    ring_chunk_nbytes: int


class Command(Struct, array_like=True):
    """A command; ``ring`` and ``zmq`` select how tensors from the socket go on to the workers."""

    what: Literal["ping", "view", "let_go", "ring", "zmq"]
    handles: list[Handle] = []


class EngineCore:
    """A frontend's connection to the core, for one call at a time."""

    def __init__(self, zmq_socket: Any) -> None:
        self._zmq_socket = zmq_socket
        self._channel = wire.AsyncChannel(self._on_frame, self._on_close)
        self._answered: asyncio.Future[list[int]] | None = None

    async def ping(self) -> list[int]:
        """Send an empty message to the core and to each worker: the lower bound."""
        return await self._call(Command("ping"))

    async def view(self, handles: Sequence[Handle]) -> list[int]:
        return await self._call(Command("view", list(handles)))

    async def let_go(self) -> None:
        await self._call(Command("let_go"))

    async def send(self, trees: Trees, *, through: Literal["ring", "zmq"]) -> list[int]:
        """Send the tensors out of band to the core, and on to the workers: a baseline."""
        await self._zmq_socket.send_multipart(tensor_message.encode(trees), copy=False)
        return await self._call(Command(through))

    async def attach(self, sock: socket.socket) -> None:
        """Wait until the core is ready."""
        self._answered = asyncio.get_running_loop().create_future()
        await self._channel.attach(sock)
        await asyncio.wait_for(self._answered, _START_TIMEOUT_S)

    async def close(self) -> None:
        await self._channel.close()

    async def _call(self, command: Command) -> list[int]:
        self._answered = asyncio.get_running_loop().create_future()
        self._channel.send(encode(command))
        return await self._answered

    def _on_frame(self, frame: bytes) -> None:
        if self._answered is not None:
            self._answered.set_result(decode(_seen_decoder, frame))

    def _on_close(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(WorkerDied("the core of the benchmark has ended"))


@asynccontextmanager
async def engine_core(
    store_address: str, num_workers: int, *, ring_chunk_nbytes: int
) -> AsyncIterator[EngineCore]:
    """Run a core and its workers; yield it when they are ready.

    Raises:
        ConfigError: pyzmq is missing.
    """
    zmq = load_zmq()
    near, far = socket.socketpair()
    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as sender:
        sender.linger = 0
        sender.bind(f"ipc://{new_address('core')}")
        settings = Settings(
            store_address=store_address,
            channel_fd=far.fileno(),
            zmq_address=sender.last_endpoint.decode(),
            num_workers=num_workers,
            ring_chunk_nbytes=ring_chunk_nbytes,
        )
        child = _start(settings)
        far.close()
        core = EngineCore(sender)
        try:
            await core.attach(near)
            yield core
        finally:
            await core.close()  # it ends with its channel
            await asyncio.to_thread(child.wait)


def _start(settings: Settings) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.engine_core"]
    command.append(msgspec.json.encode(settings).decode())
    env = {**os.environ, **THREAD_ENV}
    return subprocess.Popen(command, pass_fds=[settings.channel_fd], env=env)


# In the core's process


async def _run(settings: Settings) -> None:
    zmq = load_zmq()
    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as receiver:
        receiver.connect(settings.zmq_address)
        started = engine_workers(
            settings.store_address,
            settings.num_workers,
            ring_chunk_nbytes=settings.ring_chunk_nbytes,
        )
        async with started as workers:
            commands: asyncio.Queue[bytes | None] = asyncio.Queue()
            channel = wire.AsyncChannel(commands.put_nowait, lambda: commands.put_nowait(None))
            await channel.attach(socket.socket(fileno=settings.channel_fd))
            channel.send(encode([]))
            decoder = msgspec.msgpack.Decoder(Command)
            while (frame := await commands.get()) is not None:
                channel.send(encode(await _do(decode(decoder, frame), workers, receiver)))


async def _do(command: Command, workers: EngineWorkers, receiver: Any) -> list[int]:
    match command.what:
        case "view":
            return await workers.view(command.handles)
        case "let_go":
            await workers.let_go()
        case "ring":
            return await workers.send_through_ring(await _receive(receiver))
        case "zmq":
            return await workers.send_through_zmq(await _receive(receiver))
        case "ping":
            return await workers.ping()
    return []


async def _receive(receiver: Any) -> Trees:
    """Receive arrays over the received buffers, without another copy."""
    frames = await receiver.recv_multipart(copy=False)
    trees: Trees = tensor_message.decode([frame.buffer for frame in frames])
    return trees


if __name__ == "__main__":
    uvloop.run(_run(msgspec.json.decode(sys.argv[1], type=Settings)))
