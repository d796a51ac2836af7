"""Frontend process: HTTP on a socket that the supervisor has bound.

    python -m afferent.proxy.frontend FD      (started by the supervisor)

This module serves an upstream's own API; `afferent.builtin.frontend` serves Afferent's.
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
from typing import Any, TypeVar

import msgspec
import uvloop
from starlette.types import ASGIApp

from afferent.admission.gate import Gate
from afferent.admission.signed_share import SignedShares
from afferent.config import ServeConfig
from afferent.engines import registry
from afferent.engines.ahead import Ahead
from afferent.engines.contract import Backend, Caller, UpstreamKind
from afferent.engines.upstream import NameOf, Upstream
from afferent.errors import ConfigError, FilesUnavailable
from afferent.files.file_store import FileLimits, FileStore, open_store
from afferent.items.item import ItemSettings, Processor
from afferent.items.stage import ItemStage
from afferent.media.families.reencoded import ReencodedFamily
from afferent.media.families.registry import fingerprint
from afferent.media.families.unknown import UnknownFamily
from afferent.media.headers.probe import Accepted
from afferent.proxy.app import UpstreamFrontend
from afferent.proxy.app_settings import AppSettings
from afferent.proxy.auth import KEY_HEADERS, Access
from afferent.proxy.browsers import BrowserGuard, with_cors
from afferent.proxy.counting import count_lateness
from afferent.proxy.doors import Doors
from afferent.proxy.exchange import Passage
from afferent.proxy.file_api import FileApi, file_app
from afferent.proxy.http_server.connection import guard
from afferent.proxy.http_server.origins import is_loopback, own_names
from afferent.proxy.http_server.server import HttpServer
from afferent.proxy.http_server.shared import ConnectionLimits
from afferent.proxy.inline_stage import InlineStage
from afferent.proxy.item_lookup import ItemLookup
from afferent.proxy.launch import LEAVE_SIGNAL, FrontendSettings
from afferent.proxy.live_audio import LiveAudio
from afferent.proxy.passed_body import BodyStage
from afferent.proxy.prompts import PromptTokens
from afferent.proxy.reference_stage import ReferenceStage
from afferent.proxy.reports import AskEngine, Reports, reports_place
from afferent.proxy.request_scope import RequestScope, RequestScopes
from afferent.proxy.responses import refusal_body
from afferent.proxy.sockets import SOCKET_PATHS, SocketPassage
from afferent.proxy.tenancy import Tenancy
from afferent.runtime.heartbeat import Board
from afferent.runtime.listening import BACKLOG
from afferent.runtime.process import ChildProcess
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.telemetry.pushing import push_counts
from afferent.telemetry.spans import Tracing
from afferent.tier.launch import UP as TIER_UP
from afferent.types import ObjectKind, decode

log = logging.getLogger(__name__)

Link = TypeVar("Link", bound=msgspec.Struct)

_TAKES_NOTHING_S = 30.0
"""Timeout of a client that reads nothing of an answer, or is unreachable."""
_WRITE_S = 300.0
"""Write timeout for the available part of an answer: 32 KiB a second."""
_REFERENCE_S = 300.0
"""The backend reads the media of a request when it begins to process it."""
_SWEEP_S = 300.0
_HEARS_WITHIN_S, _LOOK_AGAIN_S = 2.0, 0.02
"""Limit of the wait for an engine before a new frontend accepts requests; interval of polls."""


async def _run(child: ChildProcess, settings: FrontendSettings) -> None:
    kind = registry.find(settings.config.engine)
    if not isinstance(kind, UpstreamKind):
        raise ConfigError(f"the engine {settings.config.engine!r} is no upstream")
    async with kind.connect(link_of(kind, settings), caller_of(child, settings)) as upstream:
        await serve(child, settings, partial(in_front, upstream), is_upstream=True)


def link_of(kind: Backend[Any, Link], settings: FrontendSettings) -> Link:
    """Return the connection data of the engine."""
    return decode(msgspec.msgpack.Decoder(kind.link_type), settings.link)


def caller_of(child: ChildProcess, settings: FrontendSettings) -> Caller:
    """Return this process, as an engine gets to know it."""
    return Caller(name=f"{child.name} {os.getpid()}", store_address=settings.store_address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Common parts of a frontend, with an engine or an upstream."""

    settings: FrontendSettings
    store: AsyncDaemonStore
    gate: Gate
    access: Access
    board: Board | None
    tracing: Tracing | None
    timeout_s: float
    files: FileStore | None = None

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
            page_port=config.ui,
            tracing=self.tracing,
        )

    def items(
        self,
        processor: Processor,
        *,
        accepted: Accepted = Accepted.DECODED,
        tenant_secret: bytes,
        name_of: NameOf | None = None,
    ) -> ItemStage:
        """Return the stage that prepares items.

        Args:
            tenant_secret: See `keys.tenant_tags`; without effect if there are no tenants.
            name_of: See `Upstream.name_of`.
        """
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
                tenant_secret=tenant_secret if self.access.has_tenants else b"",
                name_of=name_of,
                files=self.files,
            ),
        )


@dataclass(frozen=True, slots=True)
class Made:
    """Application with its close function, the engine's statistics and its readiness."""

    app: ASGIApp
    close: Callable[[], Awaitable[None]]
    stats: AskEngine
    has_engine: Callable[[], bool]
    websocket_paths: Collection[str] = ()


async def serve(
    child: ChildProcess,
    settings: FrontendSettings,
    make: Callable[[Parts], Made],
    *,
    is_upstream: bool,
) -> None:
    config = settings.config
    if config.tier:
        TIER_UP.labels().set(0)
    store = await AsyncDaemonStore.connect(settings.store_address, name=child.name, writable=True)
    background = [
        asyncio.create_task(push_counts(store)),
        asyncio.create_task(count_lateness()),
    ]
    gate = Gate(
        store,
        timeout_s=config.admission_timeout_s,
        max_concurrency=config.max_mm_preprocess_concurrency,
        max_uploads_nbytes=int(store.capacity_nbytes * config.shares[ObjectKind.RAW] / 2),
    )
    doors = None
    if child.board is not None:
        doors = Doors(child.board, child.name)
        background.append(asyncio.create_task(child.keep_beating(doors.count)))
    access = Access(
        store,
        api_key=config.api_key,
        tenants=config.tenants,
        signatures=SignedShares(config.fleet_secret.encode()) if config.fleet_secret else None,
        trusts_gateways=config.gateway_tenants,
        doors=doors,
    )
    tracing = Tracing.of_environment(model_name=settings.model_name)
    files = open_store(config.files_store, FileLimits.of(config)) if config.files_store else None
    if files is not None:
        background.append(asyncio.create_task(_keep_swept(files)))
    made = make(
        Parts(
            settings=settings,
            store=store,
            gate=gate,
            access=access,
            board=child.board,
            tracing=tracing,
            timeout_s=config.timeout_s(is_upstream=is_upstream),
            files=files,
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
    # With 256 clients, collecting at every 700 new objects took 6 % of the time, every hundredth
    # time for all objects: up to 11 ms. At every 5,000, the new ones alone took as long.
    gc.set_threshold(2_000)
    gc.collect()  # exclude all existing objects from later collections
    child.report("HTTP", ready=True)
    try:
        await server.serve()
    finally:
        for task in background:
            task.cancel()
        stack.close()
        await made.close()
        if files is not None:
            files.close()
        if tracing is not None:
            tracing.close()


async def _keep_swept(files: FileStore) -> None:
    """Delete expired files, and what dead processes have left."""
    while True:
        with contextlib.suppress(FilesUnavailable):  # logged
            await files.run(files.sweep)
        await asyncio.sleep(_SWEEP_S)


async def _hear_of_engine(has_engine: Callable[[], bool]) -> None:
    """Wait a moment for an existing engine.

    Otherwise a successor would refuse requests that its predecessor would have answered.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_HEARS_WITHIN_S):
            while not has_engine():
                await asyncio.sleep(_LOOK_AGAIN_S)


def in_front(upstream: Upstream, base: Parts) -> Made:
    """Make the application with an upstream's APIs; media are replaced by media handles."""
    settings, folder, family = base.app_settings, base.folder, base.settings.family
    tokens = None
    if family is None:
        processor = Processor(UnknownFamily(), b"")
    else:
        processor = Processor(family, fingerprint(folder, family))
        if upstream.reads_arena:
            tokens = PromptTokens(folder, family)
    config = base.settings.config
    accepted = Accepted.ALL if upstream.takes_any_file else Accepted.KNOWN
    has_embeddings = bool(config.tier) and config.shares[ObjectKind.EMBEDDINGS] > 0
    secret, has_tenants = config.fleet_secret.encode() or upstream.salt_key, base.access.has_tenants
    tenancy = Tenancy(
        has_tenants=has_tenants,
        secret=secret,
        has_salt=upstream.takes_salt,
        is_any_server=not upstream.reads_arena,
    )
    if has_tenants and upstream.name_of is not None:
        raise ConfigError(
            "with tenants, items must be named by Afferent, so that tenants share no results: "
            "leave out --engine-hashes"
        )
    items = base.items(processor, accepted=accepted, tenant_secret=secret, name_of=upstream.name_of)
    stage = ReferenceStage(
        *(base.store, items, upstream, tokens),
        has_tenants=has_tenants,
        valid_s=min(settings.request_timeout_s, _REFERENCE_S),
        ahead=Ahead(base.store) if has_embeddings else None,
    )
    scopes = RequestScopes(base.store, base.access, settings)
    inline = None
    if not upstream.reads_arena:
        if not isinstance(family, ReencodedFamily):
            raise ConfigError("an upstream that reads no arena needs a family of files")
        inline = InlineStage(base.store, items, upstream, family, secret=secret)
    bodies = BodyStage(
        *(base.store, base.gate, upstream, stage, settings, tenancy),
        inline=inline,
        files=base.files,
    )
    passage = Passage(
        *(base.store, base.gate, upstream, stage, bodies, settings, base.access, scopes, tenancy)
    )
    files = None if base.files is None else FileApi(base.files, scopes, settings)

    def audio_of(own: RequestScope) -> LiveAudio:
        limits = settings.limits_of(own.share)
        return LiveAudio(
            *(base.store, base.gate, own, limits), limit_nbytes=items.live_audio_nbytes
        )

    app = UpstreamFrontend(
        passage,
        SocketPassage(upstream, base.access, scopes, audio_of if upstream.reads_arena else None),
        *(base.store, upstream, base.board, ItemLookup(base.store, base.access)),
        makes_features=family is not None,
        page_port=settings.page_port,
        # An upstream of another kind than vLLM may store files itself.
        files=file_app(files) if files is not None or upstream.reads_arena else None,
    )
    return Made(
        with_cors(app, settings.cors_origins),
        stage.close,
        upstream.stats,
        lambda: upstream.is_ready,
        websocket_paths=SOCKET_PATHS,
    )


def _guarded(app: ASGIApp, config: ServeConfig, access: Access) -> ASGIApp:
    """Refuse pages of other origins, if no key does."""
    if access.has_keys:
        return app
    names = own_names(config.host) | {name.lower() for name in config.allowed_hosts}
    return BrowserGuard(
        app, names=names, origins=config.cors_origin, is_loopback=is_loopback(config.host)
    )


def _server(made: Made, app: ASGIApp, config: ServeConfig, listener: socket.socket) -> HttpServer:
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


def main(run: Callable[[ChildProcess, FrontendSettings], Awaitable[None]] = _run) -> None:
    """Run a frontend process, which ``run`` is the life of."""

    async def live(child: ChildProcess) -> None:
        await run(child, child.settings(FrontendSettings))

    child = ChildProcess.start()
    try:
        uvloop.run(live(child))
    except ConfigError as error:
        child.refuse(error.message)


if __name__ == "__main__":
    main()
