"""An engine for `benchmarks.gate` instead of the core, which only waits.

    python -m benchmarks.gate_engine FD

It handles a request's items as the core does: it pins them, accepts the request, and unpins them
after the prefill. It prefills one request at a time, and answers with one token. With
``accepts_at_end``, it reports the acceptance only at the end, so that a frontend holds its memory
until the end of the request.
"""

from __future__ import annotations

import asyncio
import socket

from msgspec import Struct

from afferent.engines.protocol import EngineInfo, EngineRequest
from afferent.engines.remote import messages as m
from afferent.errors import AfferentError
from afferent.runtime import wire
from afferent.runtime.process import ChildProcess, run_until_terminated
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.types import Failure, decode, encode

_INFO = EngineInfo(max_model_len=1 << 17, eos_token_ids=[])
_TOKEN_ID = 100  # any token of text


class Settings(Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the engine; ``prefill_s`` is the time of one request."""

    store_address: str
    listener_fd: int
    prefill_s: float
    accepts_at_end: bool


class _Engine:
    def __init__(self, store: AsyncDaemonStore, settings: Settings) -> None:
        self._store, self._prefill_s = store, settings.prefill_s
        self._accepts_at_end = settings.accepts_at_end
        self._accepted: asyncio.Queue[tuple[_Frontend, EngineRequest]] = asyncio.Queue()
        self._accepting: set[asyncio.Task[None]] = set()

    async def serve(self, listener: socket.socket) -> None:
        """Accept frontends until cancelled."""
        listener.setblocking(False)
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            wire.check_peer(sock)
            await _Frontend(self).channel.attach(sock)

    def submit(self, frontend: _Frontend, request: EngineRequest) -> None:
        task = asyncio.create_task(self._accept(frontend, request))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def _accept(self, frontend: _Frontend, request: EngineRequest) -> None:
        try:
            await self._store.get(request.request_id, [item.handle for item in request.items])
        except AfferentError as error:
            failure = Failure(error.code, error.message)
            frontend.send(m.RequestFailed(request.request_id, failure))
            return
        if not self._accepts_at_end:
            frontend.send(m.RequestAccepted(request.request_id))
        self._accepted.put_nowait((frontend, request))

    async def prefill(self) -> None:
        """Prefill one request after another until cancelled."""
        while True:
            frontend, request = await self._accepted.get()
            await asyncio.sleep(self._prefill_s)
            self._store.forget(request.request_id)
            if self._accepts_at_end:
                frontend.send(m.RequestAccepted(request.request_id))
            frontend.send(m.RequestTokens(request.request_id, [_TOKEN_ID], [], []))
            frontend.send(m.RequestFinished(request.request_id, "length", []))


class _Frontend:
    """A connection of a frontend."""

    def __init__(self, engine: _Engine) -> None:
        self._engine = engine
        self.channel = wire.AsyncChannel(self._on_frame, lambda: None)

    def send(self, message: m.ToFrontend) -> None:
        if self.channel.is_open:
            self.channel.send(encode(message))

    def _on_frame(self, frame: bytes) -> None:
        match decode(m.from_frontend_decoder, frame):
            case m.FrontendHello():
                self.send(m.Health(_INFO))
            case m.Submit(request=request):
                self._engine.submit(self, request)
            case m.Abort():
                pass  # its client has gone, but the request is prefilled in its turn
            case m.AskStats():
                self.send(m.Stats(None))


async def _run(child: ChildProcess, settings: Settings) -> None:
    store = await AsyncDaemonStore.connect(settings.store_address, name="core")
    engine = _Engine(store, settings)
    listener = socket.socket(fileno=settings.listener_fd)
    child.report("stub engine", ready=True)
    await run_until_terminated(engine.serve(listener), engine.prefill())


def main() -> None:
    child = ChildProcess.start()
    asyncio.run(_run(child, child.settings(Settings)))


if __name__ == "__main__":
    main()
