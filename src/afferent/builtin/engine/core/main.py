"""Engine core: one process between the frontends and the workers. It sees no tensor.

    python -m afferent.builtin.engine.core.main FD      (started by the supervisor)

The core pins a request's items under its own connection to the store, and acknowledges; only then
the frontend unpins them. The core unpins them as soon as the workers have encoded them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

import uvloop

from afferent.builtin.engine import messages as m
from afferent.builtin.engine.core.forms import Forms
from afferent.builtin.engine.core.loop import EngineLoop
from afferent.builtin.engine.core.pins import Pins
from afferent.builtin.engine.core.ranks import Ranks
from afferent.builtin.engine.launch import CoreSettings
from afferent.engines.protocol import EngineInfo, EngineRequest, EngineStats
from afferent.engines.remote import messages as remote
from afferent.errors import ConnectionClosed, EngineUnavailable, FormatError, WorkerDied
from afferent.runtime import wire
from afferent.runtime.logs import Seldom
from afferent.runtime.process import ChildProcess, run_until_terminated
from afferent.schedule.step import UNLIMITED, Limits
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.types import Failure, decode, encode

log = logging.getLogger(__name__)
_seldom = Seldom(log)

_KV_BLOCK_TOKENS = 16
_RUNNING_PER_DECODE = 16
"""Factor by which more requests may have KV cache than get a token in a step, so that a new request
does not wait until an answer has ended.
"""


class EngineCore:
    """Connects frontends, which come and go, to the `EngineLoop` of the present workers.

    Invariants:
        - There is one `Ranks` at a time; it is replaced when its first worker is lost.
        - There is an `EngineLoop` exactly while all workers are ready.
        - When the workers are lost, all their requests fail retryably.
    """

    def __init__(self, store: AsyncDaemonStore, settings: CoreSettings) -> None:
        self._pins = Pins(store, settings.position_features, has_tier=settings.has_tier)
        self._settings = settings
        self._stats = EngineStats(num_encoded=[0] * settings.num_workers)
        self.forms = Forms()
        self._frontends: dict[wire.AsyncChannel, None] = {}  # in order of arrival
        self._loop: EngineLoop | None = None
        self._running: asyncio.Task[None] | None = None
        self._ranks = self._new_ranks()

    async def serve(self, listener: socket.socket) -> None:
        """Accept frontends and workers until cancelled."""
        async for sock, peer in wire.accept_peers(listener):
            await _Connection(self, sock, peer).start()

    # Workers

    def ranks_for(self, rank: int) -> Ranks:
        """Return the group that a worker of this rank joins: one without a worker of this rank."""
        if rank in self._ranks:
            log.warning("a worker has come again before its end was seen", extra={"rank": rank})
            self._ranks.end()
        return self._ranks

    def _new_ranks(self) -> Ranks:
        return Ranks(
            self._settings.num_workers,
            step_timeout_s=self._settings.step_timeout_s,
            on_ready=self._on_workers_ready,
            on_end=self._on_workers_gone,
        )

    def _on_workers_ready(self) -> None:
        ranks = self._ranks
        limits = _limits(self._settings, ranks.info)
        self._loop = EngineLoop(ranks, self._pins, self.forms, limits, self._stats)
        self._running = asyncio.create_task(self._loop.run())
        self._announce_health()

    def _on_workers_gone(self) -> None:
        self._stats.num_restarts += 1
        lost, self._loop = self._loop, None
        self._ranks = self._new_ranks()
        self._announce_health()
        if lost is not None:
            lost.fail_all(WorkerDied("the engine's worker died; try again"))
            lost.update_stats()
        if self._running is not None:
            self._running.cancel()

    # Frontends

    def on_frontend(self, channel: wire.AsyncChannel) -> None:
        self._frontends[channel] = None
        channel.send(encode(remote.Health(self._info)))

    def on_frontend_gone(self, channel: wire.AsyncChannel) -> None:
        self._frontends.pop(channel, None)
        if self._loop is not None:
            self._loop.abort_all(channel)

    def on_submit(self, channel: wire.AsyncChannel, request: EngineRequest) -> None:
        if self._loop is None:
            error = EngineUnavailable("the engine is not ready; try again")
            failure = Failure(error.code, error.message)
            channel.send(encode(remote.RequestFailed(request.request_id, failure)))
            return
        self._loop.submit(request, channel)

    def on_abort(self, request_id: str) -> None:
        if self._loop is not None:
            self._loop.abort(request_id)

    def on_end_session(self, channel: wire.AsyncChannel, session_id: str) -> None:
        if self._loop is not None:
            self._loop.end_session(session_id, channel)

    def on_find_session(self, channel: wire.AsyncChannel, session_id: str) -> None:
        found = None if self._loop is None else self._loop.find_session(session_id)
        channel.send(encode(remote.SessionFound(session_id, found)))

    def on_ask_stats(self, channel: wire.AsyncChannel) -> None:
        if self._loop is not None:
            self._loop.update_stats()
        channel.send(encode(remote.Stats(self._stats)))

    @property
    def _info(self) -> EngineInfo | None:
        return None if self._loop is None else self._loop.info

    def _announce_health(self) -> None:
        for frontend in self._frontends:
            with contextlib.suppress(ConnectionClosed):
                frontend.send(encode(remote.Health(self._info)))


class _Connection:
    """Connection to the core; its first message identifies the peer."""

    def __init__(self, core: EngineCore, sock: socket.socket, peer: wire.Peer) -> None:
        self._core, self._sock, self._peer = core, sock, peer
        self._channel = wire.AsyncChannel(self._on_frame, self._on_close)
        self._is_frontend = self._tries_forms = False
        self._ranks: Ranks | None = None
        self._rank = 0

    async def start(self) -> None:
        await self._channel.attach(self._sock)

    def _on_frame(self, frame: bytes) -> None:
        if not self._has_begun and (refusal := remote.refusal_of(frame)):
            _seldom.warning(refusal)
            self._channel.send(encode(remote.Refused(remote.VERSION)))
            return
        message: m.ToCore = decode(m.to_core_decoder, frame)
        if self._is_frontend:
            self._on_frontend_message(message)
        elif self._ranks is not None:
            self._on_worker_message(self._ranks, message)
        elif self._tries_forms:
            self._on_form_message(message)
        elif isinstance(message, m.FormsHello):
            self._tries_forms = True
            self._core.forms.attach(self._channel)
        elif isinstance(message, remote.FrontendHello):
            self._is_frontend = True
            self._core.on_frontend(self._channel)
        elif isinstance(message, m.WorkerHello):
            ranks = self._core.ranks_for(message.rank)
            ranks.join(message, self._channel, self._sock, self._peer)
            self._ranks, self._rank = ranks, message.rank  # the end of this worker ends them
        else:
            raise FormatError("a connection begins with a hello")

    @property
    def _has_begun(self) -> bool:
        return self._is_frontend or self._tries_forms or self._ranks is not None

    def _on_frontend_message(self, message: m.ToCore) -> None:
        match message:
            case remote.Submit(request=request):
                self._core.on_submit(self._channel, request)
            case remote.Abort(request_id=request_id):
                self._core.on_abort(request_id)
            case remote.EndSession(session_id=session_id):
                self._core.on_end_session(self._channel, session_id)
            case remote.FindSession(session_id=session_id):
                self._core.on_find_session(self._channel, session_id)
            case remote.AskStats():
                self._core.on_ask_stats(self._channel)
            case _:
                raise FormatError("this message is not a frontend's")

    def _on_worker_message(self, ranks: Ranks, message: m.ToCore) -> None:
        match message:
            case _ if ranks.has_ended:
                return  # the message was sent before the worker was cut off
            case m.WorkerReady():
                ranks.set_ready(self._rank, message)
            case m.WorkDone():
                ranks.set_done(self._rank, message)
            case _:
                raise FormatError("this message is not a worker's")

    def _on_form_message(self, message: m.ToCore) -> None:
        if not isinstance(message, m.FormTried):
            raise FormatError("this message is not of who tries forms")
        self._core.forms.on_tried(message)

    def _on_close(self) -> None:
        if self._is_frontend:
            self._core.on_frontend_gone(self._channel)
        elif self._tries_forms:
            self._core.forms.detach(self._channel)
        elif self._ranks is not None:
            self._ranks.end()


def _limits(settings: CoreSettings, info: EngineInfo) -> Limits:
    """Return the budgets for the model that the workers have loaded."""
    kv_tokens = settings.kv_budget.tokens_for(info)
    return Limits(
        max_num_seqs=_RUNNING_PER_DECODE * _max_num_seqs(settings),
        max_step_decodes=_max_num_seqs(settings),
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_batched_embeds=settings.max_num_batched_embeds,
        cache_nbytes=settings.encoder_cache_nbytes,
        kv_num_blocks=UNLIMITED if kv_tokens is None else -(-kv_tokens // _KV_BLOCK_TOKENS),
        kv_block_tokens=_KV_BLOCK_TOKENS,
        can_split_items=info.can_split_items,
        max_kept_tokens=settings.prefix_cache_tokens,
    )


def _max_num_seqs(settings: CoreSettings) -> int:
    """Return the limit of sequences, so that each can get a token in a step."""
    return min(settings.max_num_seqs, settings.max_num_batched_tokens)


async def _run(child: ChildProcess, settings: CoreSettings) -> None:
    store = await AsyncDaemonStore.connect(settings.store_address, name="core")
    core = EngineCore(store, settings)
    listener = socket.socket(fileno=settings.listener_fd)
    child.report(f"up to {_max_num_seqs(settings)} requests at a time", ready=True)
    await run_until_terminated(core.serve(listener), child.keep_beating())


def main() -> None:
    child = ChildProcess.start()
    uvloop.run(_run(child, child.settings(CoreSettings)))


if __name__ == "__main__":
    main()
