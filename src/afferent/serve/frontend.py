"""Frontend process: HTTP on a socket that the supervisor has bound.

python -m afferent.serve.frontend FD      (started by the supervisor)
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import uvloop
from starlette.types import ASGIApp

from afferent.admit.gate import Gate
from afferent.config import ServeConfig
from afferent.engine import registry
from afferent.engine.ahead import Ahead
from afferent.engine.contract import Caller, EngineKind, UpstreamKind
from afferent.engine.protocol import Engine, check_engine
from afferent.engine.upstream import Upstream
from afferent.errors import ConfigError, InternalError
from afferent.http_server.connection import guard
from afferent.http_server.origins import is_loopback, own_names
from afferent.http_server.server import HttpServer
from afferent.http_server.shared import ConnectionLimits
from afferent.ingest.probe import Accepted
from afferent.preprocess.families.unknown import UnknownFamily
from afferent.preprocess.registry import fingerprint
from afferent.runtime.heartbeat import Board
from afferent.runtime.listening import BACKLOG
from afferent.runtime.process import ChildProcess
from afferent.serve.apis.registry import CONVERSATIONS, by_path
from afferent.serve.flow.counting import count_lateness
from afferent.serve.flow.item_state import Processor
from afferent.serve.flow.items import ItemSettings, ItemStage
from afferent.serve.flow.pipeline import Pipeline
from afferent.serve.flow.prompt import PromptBuilder, sampling_defaults
from afferent.serve.http.app import Frontend
from afferent.serve.http.auth import KEY_HEADERS, Access
from afferent.serve.http.browsers import BrowserGuard
from afferent.serve.http.doors import Doors
from afferent.serve.http.endpoint import AppSettings
from afferent.serve.http.reports import AskEngine, Reports, reports_place
from afferent.serve.http.responses import refusal_body
from afferent.serve.launch import LEAVE_SIGNAL, FrontendSettings
from afferent.serve.upstream.app import UpstreamFrontend
from afferent.serve.upstream.exchange import Passage
from afferent.serve.upstream.items import ReferenceStage
from afferent.serve.upstream.prompts import PromptTokens
from afferent.serve.upstream.sockets import SOCKET_PATHS, SocketPassage
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.telemetry.pushing import push_counts
from afferent.telemetry.spans import Tracing
from afferent.tier.launch import UP as TIER_UP
from afferent.types import ObjectKind, decode

log = logging.getLogger(__name__)

_TAKES_NOTHING_S = 30.0
"""Timeout of a client that reads nothing of an answer, or is unreachable."""
_WRITE_S = 300.0
"""Write timeout for the available part of an answer: 32 KiB a second."""
_REFERENCE_S = 300.0
"""The backend reads the media of a request when it begins to process it."""
_HEARS_WITHIN_S, _LOOK_AGAIN_S = 2.0, 0.02
"""Limit of the wait for an engine before a new frontend accepts requests; interval of polls."""


async def _run(child: ChildProcess, settings: FrontendSettings) -> None:
    kind = registry.find(settings.config.engine)
    link = decode(msgspec.msgpack.Decoder(kind.link_type), settings.link)
    name = f"{child.name} {os.getpid()}"
    caller = Caller(name=name, store_address=settings.store_address)
    match kind:
        case UpstreamKind():
            async with kind.connect(link, caller) as upstream:
                await _serve(child, settings, partial(_in_front, upstream), is_upstream=True)
        case EngineKind():
            async with kind.connect(link, caller) as engine:
                check_engine(engine)
                await _serve(child, settings, partial(_with_engine, engine), is_upstream=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """Common parts of a frontend, with an engine or an upstream."""

    settings: FrontendSettings
    store: AsyncDaemonStore
    gate: Gate
    access: Access
    board: Board | None
    tracing: Tracing | None
    timeout_s: float

    @property
    def folder(self) -> Path:
        return Path(self.settings.model_folder)

    @property
    def app_settings(self) -> AppSettings:
        config = self.settings.config
        return AppSettings(
            model_name=self.settings.model_name,
            aliases=config.served_model_name[1:],
            limits=config.request_limits,
            limits_by_tenant=config.limits_by_tenant,
            request_timeout_s=self.timeout_s,
            explain=config.explain,
            refuses_unknown=config.unknown_fields == "refuse",
            cors_origins=config.cors_origin,
            tracing=self.tracing,
        )

    def items(self, processor: Processor, *, accepted: Accepted = Accepted.DECODED) -> ItemStage:
        config = self.settings.config
        return ItemStage(
            self.store,
            self.gate,
            processor,
            ItemSettings(
                limits=config.request_limits,
                limits_by_tenant=config.limits_by_tenant,
                shares=config.shares,
                timeout_s=self.timeout_s,
                has_tier=bool(config.tier),
                accepted=accepted,
            ),
        )


@dataclass(frozen=True, slots=True)
class _Made:
    """Application with its close function, the engine's statistics and its readiness."""

    app: ASGIApp
    close: Callable[[], Awaitable[None]]
    stats: AskEngine
    has_engine: Callable[[], bool]
    websocket_paths: Collection[str] = ()


async def _serve(
    child: ChildProcess,
    settings: FrontendSettings,
    make: Callable[[_Base], _Made],
    *,
    is_upstream: bool,
) -> None:
    config = settings.config
    if config.tier:
        TIER_UP.labels().set(0)
    store = await AsyncDaemonStore.connect(settings.store_address, name=child.name, writable=True)
    background = [
        asyncio.create_task(push_counts(store)),
        asyncio.create_task(child.keep_beating()),
        asyncio.create_task(count_lateness()),
    ]
    gate = Gate(
        store,
        timeout_s=config.admission_timeout_s,
        max_concurrency=config.max_mm_preprocess_concurrency,
        max_uploads_nbytes=int(store.capacity_nbytes * config.shares[ObjectKind.RAW] / 2),
    )
    doors = Doors(child.board, child.name) if child.board is not None else None
    access = Access(store, api_key=config.api_key, tenants=config.tenants, doors=doors)
    tracing = Tracing.of_environment(model_name=settings.model_name)
    made = make(
        _Base(
            settings=settings,
            store=store,
            gate=gate,
            access=access,
            board=child.board,
            tracing=tracing,
            timeout_s=config.timeout_s(is_upstream=is_upstream),
        )
    )
    stack = contextlib.ExitStack()
    if settings.sockets_folder:
        reports = Reports(child.name, settings.model_name, settings.store_address, made.stats)
        place = stack.enter_context(reports_place(Path(settings.sockets_folder)))
        background.append(asyncio.create_task(reports.serve(place)))
    listener = socket.socket(fileno=settings.listener_fd)
    server = _server(made, _guarded(made.app, config, access), config, listener)
    asyncio.get_running_loop().add_signal_handler(LEAVE_SIGNAL, server.leave)
    guard(listener, timeout_s=_TAKES_NOTHING_S)
    await _hear_of_engine(made.has_engine)
    # Before the frontend reports ready: the first clients wait for the server a moment.
    listener.listen(BACKLOG)
    gc.collect()  # exclude all existing objects from later collections
    child.report("HTTP", ready=True)
    try:
        await server.serve()
    finally:
        for task in background:
            task.cancel()
        stack.close()
        await made.close()
        if tracing is not None:
            tracing.close()


async def _hear_of_engine(has_engine: Callable[[], bool]) -> None:
    """Wait a moment for an existing engine.

    Otherwise a successor would refuse requests that its predecessor would have answered.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_HEARS_WITHIN_S):
            while not has_engine():
                await asyncio.sleep(_LOOK_AGAIN_S)


def _with_engine(engine: Engine, base: _Base) -> _Made:
    """Make the application with Afferent's APIs, over an engine that takes tokens."""
    folder, family = base.folder, base.settings.family
    if family is None:
        raise InternalError("an engine that takes features has no family")
    pipeline = Pipeline(
        store=base.store,
        engine=engine,
        prompts=PromptBuilder(folder, family),
        items=base.items(Processor(family, fingerprint(folder, family))),
        sampling=sampling_defaults(folder),
    )
    app = Frontend(
        pipeline, base.gate, base.app_settings, access=base.access, board=base.board
    ).app()
    return _Made(app, pipeline.close, engine.stats, lambda: engine.info is not None)


def _in_front(upstream: Upstream, base: _Base) -> _Made:
    """Make the application with an upstream's APIs; media are replaced by media handles."""
    settings, folder, family = base.app_settings, base.folder, base.settings.family
    if family is None:
        processor, tokens = Processor(UnknownFamily(), b""), None
    else:
        processor = Processor(family, fingerprint(folder, family))
        tokens = PromptTokens(folder, family)
    config = base.settings.config
    accepted = Accepted.ALL if upstream.takes_any_file else Accepted.KNOWN
    has_embeddings = bool(config.tier) and config.shares[ObjectKind.EMBEDDINGS] > 0
    stage = ReferenceStage(
        *(base.store, base.items(processor, accepted=accepted), upstream, tokens),
        valid_s=min(settings.request_timeout_s, _REFERENCE_S),
        ahead=Ahead(base.store) if has_embeddings else None,
    )
    passage = Passage(
        base.store, base.gate, upstream, stage, settings, base.access, by_path(CONVERSATIONS)
    )
    app = UpstreamFrontend(
        passage,
        SocketPassage(base.store, upstream, base.access),
        *(base.store, upstream, base.board),
        makes_features=family is not None,
    )
    return _Made(
        app, stage.close, upstream.stats, lambda: upstream.is_ready, websocket_paths=SOCKET_PATHS
    )


def _guarded(app: ASGIApp, config: ServeConfig, access: Access) -> ASGIApp:
    """Refuse pages of other origins, if no key does."""
    if access.has_keys:
        return app
    names = own_names(config.host) | {name.lower() for name in config.allowed_hosts}
    return BrowserGuard(
        app, names=names, origins=config.cors_origin, is_loopback=is_loopback(config.host)
    )


def _server(made: _Made, app: ASGIApp, config: ServeConfig, listener: socket.socket) -> HttpServer:
    limits = ConnectionLimits(
        header_timeout_s=config.body_idle_timeout_s,
        discard_timeout_s=config.body_timeout_s,
        write_timeout_s=_WRITE_S,
    )
    return HttpServer(
        app,
        listener,
        limits,
        refuse=refusal_body,
        drain_timeout_s=config.drain_timeout_s,
        websocket_paths=made.websocket_paths,
        single_fields=KEY_HEADERS,
    )


def main() -> None:
    child = ChildProcess.start()
    try:
        uvloop.run(_run(child, child.settings(FrontendSettings)))
    except ConfigError as error:
        child.refuse(error.message)


if __name__ == "__main__":
    main()
