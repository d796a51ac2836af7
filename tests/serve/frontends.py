"""A frontend in this process: a real store, a worker in a thread, an engine that says one word."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import httpx2 as httpx

from afferent.admit.gate import Gate
from afferent.config import Limits, RequestLimits
from afferent.engine.protocol import (
    Accepted,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    Finished,
    Tokens,
)
from afferent.errors import StoreUnavailable
from afferent.ingest.digest import Digester
from afferent.metrics import Metrics
from afferent.preprocess.measure import family_of
from afferent.preprocess.registry import fingerprint
from afferent.preprocess.worker import Worker
from afferent.serve.app import AppSettings, Frontend
from afferent.serve.items import ItemStage
from afferent.serve.pipeline import Pipeline
from afferent.serve.prompt import PromptBuilder, sampling_defaults
from afferent.store.async_client import AsyncDaemonStore
from afferent.store.client import DaemonStore
from afferent.store.region import DEFAULT_SHARES
from afferent.supervise import BUILT_IN_MODELS
from afferent.types import MiB

SHAPES = BUILT_IN_MODELS / "shapes"
SHARES = DEFAULT_SHARES
ARENA_NBYTES = 32 * MiB


class WordEngine:
    """Accepts at once, and answers with one token."""

    info = EngineInfo(4096, [2])

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        yield Accepted()
        yield Tokens([10], [])
        yield Finished("stop", [])


@contextlib.contextmanager
def preprocess_worker(address: str) -> Iterator[None]:
    """Does jobs in a thread, unconfined, until the store is closed."""
    store = DaemonStore(address, name="worker", writable=True)
    worker = Worker(store, family_of(SHAPES), name="worker", limits=Limits(), item_cpu_s=60.0)

    def work() -> None:
        with contextlib.suppress(StoreUnavailable):
            while True:
                worker._do(store.take())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        store.close()
        thread.join(30)


@contextlib.asynccontextmanager
async def frontend(
    address: str, *, wrap: Any = lambda store: store, **limits: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """``wrap`` may put something between the frontend and its store."""
    real = await AsyncDaemonStore.connect(address, name="frontend", writable=True)
    store, family, metrics = wrap(real), family_of(SHAPES), Metrics()
    request_limits = RequestLimits(**limits)
    gate = Gate(store, timeout_s=request_limits.admission_timeout_s)
    items = ItemStage(
        store,
        gate,
        family,
        fingerprint(SHAPES, family),
        limits=request_limits,
        shares=SHARES,
        timeout_s=30.0,
        metrics=metrics,
        digester=Digester(1),
    )
    pipeline = Pipeline(
        store=store,
        engine=WordEngine(),
        prompts=PromptBuilder(SHAPES, family),
        items=items,
        sampling=sampling_defaults(SHAPES),
        metrics=metrics,
    )
    settings = AppSettings(
        model_name="shapes", limits=request_limits, request_timeout_s=60.0, explain=False
    )
    app = Frontend(pipeline, gate, metrics, settings).app()
    transport = httpx.ASGITransport(app=app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
            yield client
    finally:
        await pipeline.close()
        await real.close()


async def post(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    """With the body's length, in one piece; as curl does."""
    return await client.post("/v1/chat/completions", content=json.dumps(body).encode())


async def post_in_chunks(
    client: httpx.AsyncClient, body: bytes, chunk_nbytes: int
) -> httpx.Response:
    """Without the body's length."""

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), chunk_nbytes):
            yield body[start : start + chunk_nbytes]

    return await client.post("/v1/chat/completions", content=chunks())
