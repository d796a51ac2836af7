"""A frontend process: HTTP on a socket that the supervisor has bound.

python -m afferent.serve.frontend FD      (started by the supervisor)
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import uvicorn
import uvloop
from starlette.types import ASGIApp

from afferent.admit.gate import Gate
from afferent.config import ServeConfig
from afferent.engine import registry
from afferent.engine.contract import Caller, EngineKind, UpstreamKind
from afferent.engine.protocol import Engine
from afferent.engine.upstream import Upstream
from afferent.errors import InternalError
from afferent.preprocess.families.unknown import UnknownFamily
from afferent.preprocess.registry import fingerprint
from afferent.runtime.listening import BACKLOG
from afferent.runtime.process import ChildProcess
from afferent.serve.flow.counting import count_lateness
from afferent.serve.flow.item_state import Processor
from afferent.serve.flow.items import ItemSettings, ItemStage
from afferent.serve.flow.pipeline import Pipeline
from afferent.serve.flow.prompt import PromptBuilder, sampling_defaults
from afferent.serve.http.app import Frontend
from afferent.serve.http.auth import Access
from afferent.serve.http.connection import ConnectionLimits, connection_class, guard
from afferent.serve.http.disconnects import HangUps
from afferent.serve.http.endpoint import AppSettings
from afferent.serve.launch import FrontendSettings
from afferent.serve.upstream.app import UpstreamFrontend
from afferent.serve.upstream.items import ReferenceStage
from afferent.serve.upstream.prompts import PromptTokens
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.telemetry.pushing import push_counts
from afferent.types import decode

log = logging.getLogger(__name__)

_TAKES_NOTHING_S = 30.0
"""How long a client may leave an answer unread, or be away, before its connection ends."""


async def _run(child: ChildProcess, settings: FrontendSettings) -> None:
    kind = registry.find(settings.config.engine)
    link = decode(msgspec.msgpack.Decoder(kind.link_type), settings.link)
    name = f"{child.name} {os.getpid()}"
    caller = Caller(name=name, store_address=settings.store_address)
    match kind:
        case UpstreamKind():
            async with kind.connect(link, caller) as upstream:
                await _serve(child, settings, partial(_in_front, settings, upstream))
        case EngineKind():
            async with kind.connect(link, caller) as engine:
                await _serve(child, settings, partial(_with_engine, settings, engine))


_Parts = tuple[ASGIApp, Callable[[], Awaitable[None]]]
"""An application, and how to close it."""


async def _serve(
    child: ChildProcess,
    settings: FrontendSettings,
    make: Callable[[AsyncDaemonStore, Gate, ItemSettings, Access], _Parts],
) -> None:
    config = settings.config
    store = await AsyncDaemonStore.connect(settings.store_address, name=child.name, writable=True)
    background = [
        asyncio.create_task(push_counts(store)),
        asyncio.create_task(count_lateness()),
    ]
    gate = Gate(
        store,
        timeout_s=config.admission_timeout_s,
        max_concurrency=config.max_mm_preprocess_concurrency,
    )
    item_settings = ItemSettings(
        limits=config.request_limits,
        shares=config.shares,
        timeout_s=config.request_timeout_s,
        num_digest_threads=config.alloc_workers,
    )
    access = Access(store, api_key=config.api_key, tenants=config.tenants)
    app, close = make(store, gate, item_settings, access)
    hang_ups = HangUps()
    server = _server(app, config, hang_ups)
    listener = socket.socket(fileno=settings.listener_fd)
    guard(listener, timeout_s=_TAKES_NOTHING_S)
    # Before anybody is notified that we serve; the first who come wait for the server a moment.
    listener.listen(BACKLOG)
    gc.collect()  # after this, what there is by now is never looked at again
    child.report("HTTP", ready=True)
    try:
        await server.serve(sockets=[listener])
    finally:
        hang_ups.close()
        for task in background:
            task.cancel()
        await close()


def _with_engine(
    settings: FrontendSettings,
    engine: Engine,
    store: AsyncDaemonStore,
    gate: Gate,
    item_settings: ItemSettings,
    access: Access,
) -> _Parts:
    """Our own APIs, over an engine that takes tokens."""
    folder, family = Path(settings.model_folder), settings.family
    if family is None:
        raise InternalError("an engine that takes features has no family")
    pipeline = Pipeline(
        store=store,
        engine=engine,
        prompts=PromptBuilder(folder, family),
        items=ItemStage(store, gate, Processor(family, fingerprint(folder, family)), item_settings),
        sampling=sampling_defaults(folder),
    )
    app = Frontend(pipeline, gate, _app_settings(settings), access=access).app()
    return app, pipeline.close


def _in_front(
    settings: FrontendSettings,
    upstream: Upstream,
    store: AsyncDaemonStore,
    gate: Gate,
    item_settings: ItemSettings,
    access: Access,
) -> _Parts:
    """An upstream's APIs, with references in the places of media."""
    folder, family = Path(settings.model_folder), settings.family
    if family is None:
        processor, tokens = Processor(UnknownFamily(), b""), None
    else:
        processor = Processor(family, fingerprint(folder, family))
        tokens = PromptTokens(folder, family)
    items = ItemStage(store, gate, processor, item_settings)
    stage = ReferenceStage(store, items, tokens, valid_s=settings.config.request_timeout_s)
    app = UpstreamFrontend(
        store,
        gate,
        upstream,
        stage,
        _app_settings(settings),
        access,
        makes_features=family is not None,
    ).app()
    return app, stage.close


def _app_settings(settings: FrontendSettings) -> AppSettings:
    return AppSettings(
        model_name=settings.model_name,
        limits=settings.config.request_limits,
        request_timeout_s=settings.config.request_timeout_s,
        explain=settings.config.explain,
    )


def _server(app: ASGIApp, config: ServeConfig, hang_ups: HangUps) -> uvicorn.Server:
    limits = ConnectionLimits(
        header_timeout_s=config.body_idle_timeout_s,
        discard_timeout_s=config.body_timeout_s,
        untaken_timeout_s=config.request_timeout_s,
    )
    return uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            http=connection_class(limits, hang_ups),
            ws="none",
            lifespan="off",
            proxy_headers=False,
            timeout_graceful_shutdown=round(config.drain_timeout_s),
        )
    )


def main() -> None:
    child = ChildProcess.start()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the supervisor says the same
    uvloop.run(_run(child, child.settings(FrontendSettings)))


if __name__ == "__main__":
    main()
