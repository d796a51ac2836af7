"""The engine core: one process between the frontends and the worker. It sees no tensor.

    python -m afferent.engine.core FD      (started by the supervisor)

The core pins a request's items under its own connection to the store, acknowledges, and only then
does the frontend let go; it lets go itself when the worker has encoded them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from afferent import wire
from afferent.engine import messages as m
from afferent.engine.protocol import EngineInfo, EngineRequest
from afferent.errors import AfferentError, EngineUnavailable, FormatError, WorkerDied
from afferent.process import ChildProcess, run_until_terminated
from afferent.schedule.scheduler import Scheduler
from afferent.schedule.step import Limits, Request
from afferent.store.async_client import AsyncDaemonStore
from afferent.types import Failure, Span, decode, encode, span_since

log = logging.getLogger(__name__)


class Settings(Struct, kw_only=True, forbid_unknown_fields=True):
    store_address: str
    listener_fd: int
    max_num_seqs: int


@dataclass(slots=True, eq=False)
class _Running:
    """A request between its submission and its end."""

    request: EngineRequest
    frontend: wire.AsyncChannel
    submitted_ns: int
    spans: list[Span] = field(default_factory=list)
    decode_start_ns: int = 0
    num_tokens: int = 0


class EngineCore:
    def __init__(self, store: AsyncDaemonStore, *, max_num_seqs: int) -> None:
        self._store = store
        # The worker prefills whole prompts, one a step, and encodes their items itself: so no
        # limit on tokens that would cut a prompt, and no items for the scheduler.
        self._scheduler = Scheduler(Limits(max_num_seqs=max_num_seqs, max_step_prefills=1))
        self._requests: dict[str, _Running] = {}
        self._frontends: set[wire.AsyncChannel] = set()
        self._worker: wire.AsyncChannel | None = None
        self._worker_pid = 0
        self._info: EngineInfo | None = None
        self._step_runs = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Accept frontends and workers until cancelled."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(listener)
            try:
                wire.check_peer(sock)
            except wire.ConnectionClosed:
                log.warning("a connection was refused")
                continue
            await _Connection(self).start(sock)

    # Events

    def on_frontend(self, channel: wire.AsyncChannel) -> None:
        self._frontends.add(channel)
        channel.send(encode(m.Health(self._info)))

    def on_frontend_gone(self, channel: wire.AsyncChannel) -> None:
        self._frontends.discard(channel)
        for request_id in [r for r, run in self._requests.items() if run.frontend is channel]:
            self._abort(request_id)
        self._run_step()

    def on_worker(self, channel: wire.AsyncChannel, hello: m.WorkerHello) -> None:
        if self._worker is not None:
            log.error("a second worker was refused")
            channel.abort()
            return
        self._worker, self._info, self._step_runs = channel, hello.info, False
        self._worker_pid = hello.pid
        self._announce_health()
        self._run_step()

    def on_worker_gone(self, channel: wire.AsyncChannel) -> None:
        if self._worker is not channel:
            return
        self._worker, self._info = None, None
        self._announce_health()
        for request_id in self._scheduler.clear():
            self._fail(request_id, WorkerDied("the engine's worker died; try again"))

    def on_submit(self, channel: wire.AsyncChannel, request: EngineRequest) -> None:
        if request.request_id in self._requests:
            raise FormatError("a request id is used twice")
        run = _Running(request, channel, time.monotonic_ns())
        self._requests[request.request_id] = run
        if self._worker is None:
            self._fail(request.request_id, EngineUnavailable("the engine is not ready; try again"))
            return
        self._spawn(self._accept(run))

    async def _accept(self, run: _Running) -> None:
        """Pin the items here, so that the frontend can let go of them."""
        request_id = run.request.request_id
        try:
            if run.request.items:
                handles = [item.handle for item in run.request.items]
                await self._store.get(request_id, handles)
        except AfferentError as error:
            self._fail(request_id, error)
            return
        if request_id not in self._requests:  # aborted meanwhile
            await self._release(request_id)
            return
        count = len(run.request.items)
        note = f"{count} pin{'s' if count > 1 else ''}" if count else ""
        run.spans.append(span_since(run.submitted_ns, "core", "accept", note=note))
        self._send(run, m.RequestAccepted(request_id))
        num_tokens, max_tokens = len(run.request.token_ids), run.request.sampling.max_tokens
        self._scheduler.add(Request(id=request_id, num_tokens=num_tokens, max_tokens=max_tokens))
        self._run_step()

    def on_abort(self, request_id: str) -> None:
        self._abort(request_id)
        self._run_step()

    def on_step_done(self, done: m.StepDone) -> None:
        self._step_runs = False
        for span in done.spans:
            # The note begins with the request's id; the account is kept by request.
            request_id, _, note = span.note.partition(" ")
            if request_id in self._requests:
                self._requests[request_id].spans.append(msgspec.structs.replace(span, note=note))
        for request_id, failure in done.failures:
            self._scheduler.abort(request_id)
            self._fail(request_id, failure)
        for request_id, token in done.tokens:
            self._on_token(request_id, token)
        self._run_step()

    # Inner steps

    def _on_token(self, request_id: str, token: int) -> None:
        run = self._requests.get(request_id)
        if run is None or self._info is None:
            return
        is_eos = token in self._info.eos_token_ids and not run.request.sampling.ignore_eos
        reason = self._scheduler.record(request_id, is_eos=is_eos)
        if run.num_tokens == 0:
            run.decode_start_ns = time.monotonic_ns()
            if run.request.items:  # encoded: the features are not needed any more
                self._spawn(self._release(request_id))
        run.num_tokens += 1
        if not is_eos:
            spans, run.spans = run.spans, []
            self._send(run, m.RequestTokens(request_id, [token], spans))
        if reason is not None:
            note = f"{run.num_tokens - 1} more tokens"
            span = span_since(run.decode_start_ns, "worker", "decode tokens", note=note)
            run.spans.append(msgspec.structs.replace(span, pid=self._worker_pid))
            self._send(run, m.RequestFinished(request_id, reason.value, run.spans))
            del self._requests[request_id]

    def _run_step(self) -> None:
        """Send the worker its next step, if it waits for one and there is work."""
        if self._worker is None or self._step_runs:
            return
        step = self._scheduler.next_step()
        if step.is_empty:
            return
        prefill = self._requests[step.prefill[0].sequence_id].request if step.prefill else None
        self._worker.send(encode(m.RunStep(step.drop, prefill, step.decode)))
        self._step_runs = True

    def _abort(self, request_id: str) -> None:
        self._scheduler.abort(request_id)
        run = self._requests.pop(request_id, None)
        if run is not None and run.request.items and run.num_tokens == 0:
            self._spawn(self._release(request_id))

    def _fail(self, request_id: str, error: AfferentError | Failure) -> None:
        run = self._requests.pop(request_id, None)
        if run is None:
            return
        if isinstance(error, AfferentError):
            error = Failure(error.code, error.message)
        self._send(run, m.RequestFailed(request_id, error))
        if run.request.items and run.num_tokens == 0:
            self._spawn(self._release(request_id))

    async def _release(self, request_id: str) -> None:
        try:
            await self._store.release(request_id)
        except AfferentError as error:  # a store that is gone holds nothing
            log.warning("items could not be released", extra={"reason": error.code})

    def _announce_health(self) -> None:
        for frontend in self._frontends:
            if frontend.is_open:
                frontend.send(encode(m.Health(self._info)))

    def _send(self, run: _Running, message: m.ToFrontend) -> None:
        if run.frontend.is_open:
            run.frontend.send(encode(message))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Connection:
    """One connection to the core; its first message says whose."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._channel = wire.AsyncChannel(self._on_frame, self._on_close)
        self._role: type[m.FrontendHello] | type[m.WorkerHello] | None = None

    async def start(self, sock: socket.socket) -> None:
        await self._channel.attach(sock)

    def _on_frame(self, frame: bytes) -> None:
        channel = self._channel
        message: m.ToCore = decode(m.to_core_decoder, frame)
        match self._role, message:
            case None, m.FrontendHello():
                self._role = m.FrontendHello
                self._core.on_frontend(channel)
            case None, m.WorkerHello():
                self._role = m.WorkerHello
                self._core.on_worker(channel, message)
            case m.FrontendHello, m.Submit(request=request):
                self._core.on_submit(channel, request)
            case m.FrontendHello, m.Abort(request_id=request_id):
                self._core.on_abort(request_id)
            case m.WorkerHello, m.StepDone():
                self._core.on_step_done(message)
            case _:
                raise FormatError("this message is not for this connection")

    def _on_close(self) -> None:
        if self._role is m.FrontendHello:
            self._core.on_frontend_gone(self._channel)
        elif self._role is m.WorkerHello:
            self._core.on_worker_gone(self._channel)


async def _run(child: ChildProcess, settings: Settings) -> None:
    store = await AsyncDaemonStore.connect(settings.store_address, name="core")
    core = EngineCore(store, max_num_seqs=settings.max_num_seqs)
    listener = socket.socket(fileno=settings.listener_fd)
    child.report(f"up to {settings.max_num_seqs} requests at a time", ready=True)
    await run_until_terminated(core.serve(listener))


def main() -> None:
    child = ChildProcess.start()
    asyncio.run(_run(child, child.settings(Settings)))


if __name__ == "__main__":
    main()
