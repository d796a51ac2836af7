"""Proxy of one request to an upstream, and of its answer."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from afferent.admission.gate import Gate
from afferent.engines.references import out_of_reach
from afferent.engines.upstream import Headers, Upstream, UpstreamAnswer, UpstreamRequest
from afferent.errors import EngineUnavailable, InvalidRequest, StoreUnavailable
from afferent.proxy import counting
from afferent.proxy.app_settings import AppSettings
from afferent.proxy.auth import Access
from afferent.proxy.client_answer import ClientAnswer
from afferent.proxy.dialects import DIALECTS, NONE
from afferent.proxy.load import LoadReports
from afferent.proxy.passed_body import BodyStage, ClientBody, PassedBody, has_body
from afferent.proxy.reference_stage import ReferenceStage
from afferent.proxy.request_scope import RequestScope, RequestScopes
from afferent.proxy.responses import path_of
from afferent.proxy.tenancy import Tenancy
from afferent.proxy.upstream_answers import without_references
from afferent.store.client.async_store import AsyncDaemonStore

log = logging.getLogger(__name__)

_SHOWN_NBYTES = 500
_ERRORS = 400
"""Statuses from here on are errors."""
_FAILURES = 500
"""Statuses from here on are failures of the upstream."""
OTHER = "upstream"
"""Metric label of endpoints that have no name here."""
_PRELUDE = re.compile(rb"event: response\.(?:created|in_progress)\n")
"""Events that precede the computation of the first token."""
_EVENT = re.compile(rb"(?m)^event: ")
_FAILURE = re.compile(rb"(?m)^(?:data: \{\"error\"|event: (?:error|response\.failed)$)")
"""Event that ends a stream with an error of the upstream."""
_CONTROL = re.compile(r"[\0-\x1f\x7f]")


class Passage:
    """Proxy of requests to all endpoints; an ASGI application."""

    def __init__(
        self,
        store: AsyncDaemonStore,
        gate: Gate,
        upstream: Upstream,
        stage: ReferenceStage,
        bodies: BodyStage,
        settings: AppSettings,
        access: Access,
        scopes: RequestScopes,
        tenancy: Tenancy,
    ) -> None:
        """Create it.

        Args:
            stage: Checks that the objects of media handles still exist.
        """
        self._gate, self._upstream, self._stage, self._bodies = gate, upstream, stage, bodies
        self._settings, self._access, self._scopes = settings, access, scopes
        self._load, self._tenancy = LoadReports(store, gate), tenancy
        counting.APIS.update({OTHER, *(api.name for api in DIALECTS.values())})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path = path_of(request)
        api = DIALECTS.get(path, NONE)
        with self._scopes.open(
            *(f"{request.method} {path}", scope["headers"]),
            id_prefix=api.id_prefix,
            api=api.name or OTHER,
        ) as own:
            client = ClientAnswer(
                scope, receive, send, own, api, has_own_cors=bool(self._settings.cors_origins)
            )
            try:
                async with asyncio.timeout_at(own.deadline):
                    await self._pass_on(request, path, own, client)
            except ClientDisconnect:
                own.leave()
            except Exception as error:
                await client.fail(own.fail(error))

    # To the upstream

    async def _pass_on(
        self, request: Request, path: str, own: RequestScope, client: ClientAnswer
    ) -> None:
        await own.admit(request.headers, request.scope)
        client.load = await self._load.look(request.scope["headers"])
        own.trace.media = "none"
        _check_target(request.scope)
        has_json = self._bodies.has_json(request, path)
        self._tenancy.check_path(path, method=request.method, has_json=has_json)
        if not self._upstream.is_ready:
            raise EngineUnavailable("the engine is not ready; try again")
        passed = partial(self._passed, request, own)
        if has_json or self._bodies.has_file(request, path):
            async with self._bodies.ready(request, path, own, passed) as body:
                await self._exchange(passed, body, own, client)
        elif has_body(request):
            own.trace.media = "unknown"
            arriving = ClientBody(request, self._settings.limits_of(own.share))
            try:
                await self._exchange(passed, PassedBody(arriving.chunks()), own, client)
            except EngineUnavailable:
                if arriving.failure is not None:
                    raise arriving.failure from None
                raise
        else:
            await self._exchange(passed, PassedBody(), own, client)

    def _passed(self, request: Request, own: RequestScope) -> UpstreamRequest:
        """Return a request as it is passed on now, without its body."""
        headers = self._access.headers_to_pass_on(
            request.scope["headers"], own.share, is_gateway=not self._upstream.reads_arena
        )
        root = own.trace.root
        return UpstreamRequest(
            method=request.method,
            target=target_of(request.scope),
            headers=headers if root is None else root.carried(headers),
            body=b"",
        )

    async def _exchange(
        self,
        passed: Callable[[], UpstreamRequest],
        body: PassedBody,
        own: RequestScope,
        client: ClientAnswer,
    ) -> None:
        """Send a request with its body, and bring back the answer."""
        own.trace.where = "engine"
        start_ns = time.monotonic_ns()
        request = replace(passed(), body=body.content, placement=body.placement, begun=body.begun)
        async with self._upstream.forward(request) as answer:
            if body.urls and (body.is_repeated or answer.status >= _ERRORS):
                answer = without_references(answer, body.urls)
            if answer.status >= _FAILURES:
                await self._stage.explain(own.id, body.referenced)
            await self._bring_back(answer, body, own, client, start_ns)

    # From the upstream

    async def _bring_back(
        self,
        answer: UpstreamAnswer,
        body: PassedBody,
        own: RequestScope,
        client: ClientAnswer,
        start_ns: int,
    ) -> None:
        """Send the bytes as they arrive, once it is certain that they are based on these media."""
        is_stream = _content_type(answer.headers).startswith(b"text/event-stream")
        held = b""
        async for chunk in answer.chunks:
            if not client.has_begun:
                held += chunk
                if is_stream and _is_prelude(held):
                    continue
                own.trace.stage(start_ns, "first_byte")
                if body.has_media:
                    own.release()  # the upstream has all of the media
                self._gate.leave(own.id)  # if the engine's plugin has not reported it
                await self._stage.check(own.id, body.referenced)
                if answer.status >= _ERRORS:
                    _check_reached(held, body.urls)
                chunk = held
            else:
                self._stage.check_here(body.referenced)
            if is_stream and _FAILURE.search(chunk):
                await self._stage.explain(own.id, body.referenced)
            if not client.has_begun:
                await client.begin(answer.status, answer.headers, is_stream=is_stream)
            await client.send(chunk)
        if not client.has_begun:
            await self._stage.check(own.id, body.referenced)
            await client.begin(answer.status, answer.headers, is_stream=is_stream)
            await client.send(held)
        await client.send(b"", is_last=True)


def target_of(scope: Scope) -> str:
    """Return path and query, as the client sent them."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return (path + (b"?" + query if query else b"")).decode("latin-1")


def _check_target(scope: Scope) -> None:
    """Refuse a target that the upstream could take for that of another endpoint than this server:
    its router ignores a line break at the end of a path, and a URL ends at a number sign.

    Raises:
        InvalidRequest: It has control characters or a number sign.
    """
    if _CONTROL.search(scope["path"]) or "#" in target_of(scope):
        raise InvalidRequest("the path has characters that no endpoint has")


def _check_reached(error: bytes, urls: Sequence[str]) -> None:
    """
    Raises:
        StoreUnavailable: The upstream could not read the media, although they exist.
    """
    if any(out_of_reach(url).encode() in error for url in urls):
        log.warning(
            "the engine could not read the media: %s",
            error[:_SHOWN_NBYTES].decode(errors="replace"),
        )
        raise StoreUnavailable("the engine could not read the media; try again")


def _content_type(headers: Headers) -> bytes:
    return next((value for name, value in headers if name.lower() == b"content-type"), b"").lower()


def _is_prelude(text: bytes) -> bool:
    """Whether the stream so far does not depend on its media."""
    return len(_PRELUDE.findall(text)) == len(_EVENT.findall(text)) > 0
