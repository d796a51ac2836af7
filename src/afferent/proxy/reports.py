"""Reports of a frontend's requests, over a socket that only its user can reach.

A question is a line of JSON, and so is the answer; a connection may send many. Reports are made on
demand, so they cost nothing while no client asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from afferent.engines.protocol import EngineStats
from afferent.engines.upstream import UpstreamStats
from afferent.errors import ConnectionClosed
from afferent.runtime import wire
from afferent.runtime.sockets import address_in
from afferent.telemetry.journal import JOURNAL, Journal, RequestReport

SOCKET_NAME: Final = "requests"
MAX_ANSWER_NBYTES: Final = 4 << 20
_MAX_QUESTION_NBYTES: Final = 1 << 10
_MAX_ASKERS: Final = 8
_ENGINE_TIMEOUT_S: Final = 0.3

AskEngine = Callable[[], Awaitable[EngineStats | UpstreamStats | None]]


class Question(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Question; ``of_engine`` includes the engine, for one frontend only: all share one engine."""

    of_engine: bool = False


class FrontendReport(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """State of a frontend at ``taken_ns`` by `time.monotonic_ns`.

    Attributes:
        num_running: Number of running requests; ``num_by_tenant`` by tenant.
        running: The oldest of them.
        ended: The latest requests, in order.
        engine: Engine statistics; ``None`` if not requested or unavailable.
        upstream: Statistics of an upstream, likewise.
    """

    process: str
    pid: int
    model_name: str
    store_address: str
    taken_ns: int
    num_running: int
    num_by_tenant: dict[str, int]
    running: list[RequestReport]
    ended: list[RequestReport]
    engine: EngineStats | None = None
    upstream: UpstreamStats | None = None


class Reports:
    """Answers questions from this process's recent-requests buffer."""

    def __init__(
        self,
        process: str,
        model_name: str,
        store_address: str,
        ask_engine: AskEngine,
        journal: Journal = JOURNAL,
    ) -> None:
        self._process, self._model_name = process, model_name
        self._store_address, self._ask_engine, self._journal = store_address, ask_engine, journal
        self._num_askers = 0

    async def serve(self, listener: socket.socket) -> None:
        """Serve until cancelled."""
        limit = _MAX_QUESTION_NBYTES
        server = await asyncio.start_unix_server(self._answer, sock=listener, limit=limit)
        async with server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_askers += 1
        try:
            wire.check_peer(writer.get_extra_info("socket"))
            while self._num_askers <= _MAX_ASKERS and (line := await reader.readline()):
                report = await self._report(msgspec.json.decode(line, type=Question))
                writer.write(msgspec.json.encode(report) + b"\n")
                await writer.drain()
        except (OSError, ValueError, msgspec.MsgspecError, ConnectionClosed):
            # It has left, or sent an invalid question.
            pass
        finally:
            self._num_askers -= 1
            writer.close()

    async def _report(self, question: Question) -> FrontendReport:
        stats = None
        if question.of_engine:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ENGINE_TIMEOUT_S):
                    stats = await self._ask_engine()
        return FrontendReport(
            process=self._process,
            pid=os.getpid(),
            model_name=self._model_name,
            store_address=self._store_address,
            taken_ns=time.monotonic_ns(),
            num_running=self._journal.num_running,
            num_by_tenant=self._journal.num_by_tenant(),
            running=self._journal.running(),
            ended=self._journal.ended(),
            engine=stats if isinstance(stats, EngineStats) else None,
            upstream=stats if isinstance(stats, UpstreamStats) else None,
        )


@contextlib.contextmanager
def reports_place(folder: Path) -> Iterator[socket.socket]:
    """Listen on a socket in the folder, until the end of the context."""
    address = address_in(folder, SOCKET_NAME)
    with wire.listen(address) as listener:
        try:
            yield listener
        finally:
            Path(address).unlink(missing_ok=True)
