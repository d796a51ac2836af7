"""A frontend process: HTTP on a socket that the supervisor has bound.

python -m afferent.serve.frontend FD      (started by the supervisor)
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path

import uvicorn
import uvloop
from msgspec import Struct

from afferent.admit.gate import Gate
from afferent.config import ServeConfig
from afferent.engine.client import CoreClient
from afferent.ingest.digest import Digester
from afferent.metrics import Metrics
from afferent.preprocess.registry import AnyFamily, fingerprint
from afferent.process import ChildProcess
from afferent.serve.app import AppSettings, Frontend
from afferent.serve.items import ItemStage
from afferent.serve.pipeline import Pipeline
from afferent.serve.prompt import PromptBuilder, sampling_defaults
from afferent.store.async_client import AsyncDaemonStore

log = logging.getLogger(__name__)


class Settings(Struct, kw_only=True, forbid_unknown_fields=True):
    listener_fd: int
    store_address: str
    core_address: str
    model_folder: str
    model_name: str
    family: AnyFamily
    config: ServeConfig


async def _run(child: ChildProcess, settings: Settings) -> None:
    config, folder = settings.config, Path(settings.model_folder)
    metrics = Metrics()
    store = await AsyncDaemonStore.connect(settings.store_address, name=child.name, writable=True)
    engine = CoreClient(settings.core_address, name=f"{child.name} {os.getpid()}")
    engine_task = asyncio.create_task(engine.run())
    gate = Gate(
        store,
        timeout_s=config.admission_timeout_s,
        on_wait=metrics.admission_seconds.observe,
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
    server = uvicorn.Server(
        uvicorn.Config(
            Frontend(pipeline, gate, metrics, app_settings).app(),
            log_config=None,
            access_log=False,
            http="httptools",
            lifespan="off",
            timeout_graceful_shutdown=round(config.drain_timeout_s),
        )
    )
    child.report("HTTP", ready=True)
    try:
        await server.serve(sockets=[socket.socket(fileno=settings.listener_fd)])
    finally:
        engine_task.cancel()
        await pipeline.close()


def main() -> None:
    child = ChildProcess.start()
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # the supervisor says the same
    uvloop.run(_run(child, child.settings(Settings)))


if __name__ == "__main__":
    main()
