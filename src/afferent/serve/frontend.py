"""A frontend process: HTTP on a socket that the supervisor has bound.

python -m afferent.serve.frontend FD      (started by the supervisor)
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from pathlib import Path

import uvicorn
import uvloop
from starlette.applications import Starlette

from afferent.admit.gate import Gate
from afferent.config import ServeConfig
from afferent.engine.client import CoreClient
from afferent.ingest.digest import Digester
from afferent.listening import BACKLOG
from afferent.metrics import Metrics
from afferent.preprocess.registry import fingerprint
from afferent.process import ChildProcess
from afferent.serve.access import Access
from afferent.serve.app import Frontend
from afferent.serve.connection import ConnectionLimits, connection_class, guard
from afferent.serve.counting import count_lateness
from afferent.serve.endpoint import AppSettings
from afferent.serve.hang_ups import HangUps
from afferent.serve.items import ItemStage
from afferent.serve.launch import FrontendSettings
from afferent.serve.pipeline import Pipeline
from afferent.serve.prompt import PromptBuilder, sampling_defaults
from afferent.store.async_client import AsyncDaemonStore
from afferent.store.pushing import push_counts

log = logging.getLogger(__name__)

_TAKES_NOTHING_S = 30.0
"""How long a client may leave an answer unread, or be away, before its connection ends."""


async def _run(child: ChildProcess, settings: FrontendSettings) -> None:
    config, folder = settings.config, Path(settings.model_folder)
    metrics = Metrics()
    store = await AsyncDaemonStore.connect(settings.store_address, name=child.name, writable=True)
    engine = CoreClient(settings.core_address, name=f"{child.name} {os.getpid()}")
    background = [
        asyncio.create_task(engine.run()),
        asyncio.create_task(push_counts(store, metrics)),
        asyncio.create_task(count_lateness(metrics)),
    ]
    gate = Gate(
        store,
        timeout_s=config.admission_timeout_s,
        max_concurrency=config.max_mm_preprocess_concurrency,
        on_wait=metrics.admission_seconds.observe,
        on_turn=metrics.slot_seconds.observe,
    )
    pipeline = Pipeline(
        store=store,
        engine=engine,
        prompts=PromptBuilder(folder, settings.family),
        items=ItemStage(
            store,
            gate,
            settings.family,
            fingerprint(folder, settings.family),
            limits=config.request_limits,
            shares=config.shares,
            timeout_s=config.request_timeout_s,
            metrics=metrics,
            digester=Digester(config.alloc_workers),
        ),
        sampling=sampling_defaults(folder),
        metrics=metrics,
    )
    app_settings = AppSettings(
        model_name=settings.model_name,
        limits=config.request_limits,
        request_timeout_s=config.request_timeout_s,
        explain=config.explain,
    )
    access = Access(store, api_key=config.api_key, tenants=config.tenants)
    app = Frontend(pipeline, gate, metrics, app_settings, access=access).app()
    hang_ups = HangUps()
    server = _server(app, config, hang_ups)
    listener = socket.socket(fileno=settings.listener_fd)
    guard(listener, timeout_s=_TAKES_NOTHING_S)
    # Before anybody is told that we serve; the first who come wait for the server a moment.
    listener.listen(BACKLOG)
    gc.collect()  # after this, what there is by now is never looked at again
    child.report("HTTP", ready=True)
    try:
        await server.serve(sockets=[listener])
    finally:
        hang_ups.close()
        for task in background:
            task.cancel()
        await pipeline.close()


def _server(app: Starlette, config: ServeConfig, hang_ups: HangUps) -> uvicorn.Server:
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
