"""A frontend in this process: a real store, a worker in a thread, an engine that says one word."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2 as httpx
from starlette.applications import Starlette

from afferent.admission.gate import Gate
from afferent.builtin.apis.api import Api
from afferent.builtin.apis.registry import APIS
from afferent.builtin.http.app import Frontend
from afferent.builtin.pipeline.pipeline import Pipeline
from afferent.builtin.pipeline.prompt import PromptBuilder, sampling_defaults
from afferent.config import Limits, RequestLimits, Tenant
from afferent.engines.protocol import (
    Accepted,
    Engine,
    EngineEvent,
    EngineInfo,
    EngineRequest,
    Finished,
    Tokens,
)
from afferent.errors import AfferentError, StoreUnavailable
from afferent.files.file_store import FileStore
from afferent.items.item import ItemSettings, Processor
from afferent.items.stage import ItemStage
from afferent.media.families.registry import AnyFamily, fingerprint
from afferent.media.workers.discover import family_of
from afferent.media.workers.worker import Worker
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from afferent.proxy.app_settings import AppSettings
from afferent.proxy.auth import Access
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.state.region import DEFAULT_SHARES
from afferent.types import MiB, ObjectKind, TokenLogprobs

SHAPES = BUILT_IN_MODELS / "shapes"
SHARES = DEFAULT_SHARES
ARENA_NBYTES = 32 * MiB


class WordEngine:
    """An engine that accepts at once and answers with one token."""

    info = EngineInfo(4096, [2])

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        yield Accepted()
        yield Tokens([10], [])
        yield Finished("stop", [])

    async def stats(self) -> None:
        return None


class ScriptedEngine:
    """An engine that answers with the same tokens each time and records its requests."""

    info = EngineInfo(4096, [2])

    def __init__(self, *steps: list[int], failure: AfferentError | None = None) -> None:
        """Script the engine.

        Args:
            steps: The tokens of each step.
            failure: The error after the last step.
        """
        self._steps, self._failure = steps, failure
        self.requests: list[EngineRequest] = []
        self.num_running = self.num_finished = 0

    async def submit(self, request: EngineRequest) -> AsyncGenerator[EngineEvent, None]:
        self.requests.append(request)
        self.num_running += 1
        try:
            yield Accepted()
            for tokens in self._steps:
                await asyncio.sleep(0)
                top = request.sampling.num_logprobs
                scored = [] if top is None else [scored_token(token, top) for token in tokens]
                yield Tokens(tokens, [], scored)
            if self._failure is not None:
                raise self._failure
            self.num_finished += 1
            yield Finished("stop", [])
        finally:
            self.num_running -= 1

    async def stats(self) -> None:
        return None


def scored_token(token: int, num_top: int) -> TokenLogprobs:
    """Return a log-probability that identifies the token; its neighbours are the likeliest."""
    return TokenLogprobs(-token / 100, [(token + i, -(token + i) / 100) for i in range(num_top)])


@contextlib.contextmanager
def preprocess_worker(address: str, family: AnyFamily | None = None) -> Iterator[None]:
    """Run jobs in a thread, without a sandbox, until the store is closed."""
    store = DaemonStore(address, name="worker", writable=True)
    family = family or family_of(SHAPES)
    worker = Worker(store, family, name="worker", limits=Limits(), item_cpu_s=60.0)

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
async def application(
    address: str,
    *,
    wrap: Any = lambda store: store,
    engine: Engine | None = None,
    family: AnyFamily | None = None,
    tenants: Sequence[Tenant] = (),
    max_concurrency: int = 0,
    apis: Sequence[Api] = APIS,
    request_timeout_s: float = 60.0,
    cors_origins: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    now_s: Callable[[], float] = time.time,
    folder: Path = SHAPES,
    files: FileStore | None = None,
    **limits: Any,
) -> AsyncIterator[Starlette]:
    """Make a frontend's application.

    Args:
        wrap: Can put an object between the frontend and its store.
        now_s: Returns the Unix time.
        folder: The model's.
    """
    real = await AsyncDaemonStore.connect(address, name="frontend", writable=True)
    store, family = wrap(real), family or family_of(folder)
    request_limits = RequestLimits(**limits)
    gate = Gate(
        store,
        timeout_s=request_limits.admission_timeout_s,
        max_concurrency=max_concurrency,
        max_uploads_nbytes=int(real.capacity_nbytes * SHARES[ObjectKind.RAW] / 2),
    )
    items = ItemStage(
        store,
        gate,
        Processor(family, fingerprint(folder, family)),
        ItemSettings(
            limits=request_limits,
            limits_by_tenant={each.name: each.within(request_limits) for each in tenants},
            shares=SHARES,
            timeout_s=30.0,
            files=files,
        ),
    )
    pipeline = Pipeline(
        store=store,
        engine=engine or WordEngine(),
        builder=PromptBuilder(folder, family),
        items=items,
        sampling=sampling_defaults(folder),
    )
    settings = AppSettings(
        model_name="shapes",
        aliases=aliases,
        limits=request_limits,
        limits_by_tenant={each.name: each.within(request_limits) for each in tenants},
        request_timeout_s=request_timeout_s,
        explain=False,
        cors_origins=cors_origins,
    )
    access = Access(store, tenants=tenants)
    made = Frontend(pipeline, gate, settings, apis=apis, access=access, now_s=now_s, files=files)
    try:
        yield made.app()
    finally:
        await pipeline.close()
        await real.close()


@contextlib.asynccontextmanager
async def frontend(address: str, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Run a frontend with the options of `application`, and a client of it."""
    async with application(address, **options) as app:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://frontend") as client:
            yield client


async def post(client: httpx.AsyncClient, body: dict[str, Any], *, key: str = "") -> httpx.Response:
    """Post the body in one piece with its length, as curl does."""
    content, headers = json.dumps(body).encode(), {"x-api-key": key} if key else {}
    return await client.post("/v1/chat/completions", content=content, headers=headers)


async def post_in_chunks(
    client: httpx.AsyncClient, body: bytes, chunk_nbytes: int
) -> httpx.Response:
    """Post the body in chunks, without its length."""

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), chunk_nbytes):
            yield body[start : start + chunk_nbytes]

    return await client.post("/v1/chat/completions", content=chunks())
