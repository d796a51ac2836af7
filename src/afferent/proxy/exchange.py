"""Proxy of one request to an upstream, and of its answer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from afferent.admission.gate import Gate
from afferent.admission.shares import Share
from afferent.engines.upstream import (
    BegunRequest,
    Headers,
    RepeatableBody,
    Upstream,
    UpstreamAnswer,
    UpstreamRequest,
)
from afferent.errors import AfferentError, BodyTooLarge, EngineUnavailable, InvalidRequest
from afferent.files.file_store import FileStore
from afferent.items.file_ids import look_up
from afferent.media.body.raw import RawMedia
from afferent.media.body.received import ReceivedBody
from afferent.proxy import counting, media_locations
from afferent.proxy.answer_headers import with_report
from afferent.proxy.app_settings import AppSettings
from afferent.proxy.auth import Access
from afferent.proxy.body import BodyReader, announced_nbytes, timely_chunks
from afferent.proxy.body_stream import BodyStream
from afferent.proxy.dialects import DIALECTS, NONE, Dialect
from afferent.proxy.http_server.exchange import hang_up
from afferent.proxy.inline_stage import Inlined, InlineStage
from afferent.proxy.load import LoadReport, LoadReports
from afferent.proxy.reference_stage import Referenced, ReferenceStage
from afferent.proxy.request_scope import RequestScope, RequestScopes
from afferent.proxy.responses import path_of, refusal
from afferent.proxy.shown_documents import documents_in, show
from afferent.proxy.tenancy import SALTED, Tenancy, plain_path
from afferent.proxy.upstream_answers import without_references
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.telemetry.trace import Trace

_ERRORS = 400
"""Statuses from here on are errors."""
_FAILURES = 500
"""Statuses from here on are failures of the upstream."""
OTHER = "upstream"
"""Metric label of endpoints that have no name here."""
_PRELUDE = re.compile(rb"event: response\.(?:created|in_progress)\n")
"""Events that precede the computation of the first token."""
_EVENT = re.compile(rb"(?m)^event: ")
_OF_CORS = b"access-control-"
_FAILURE = re.compile(rb"(?m)^(?:data: \{\"error\"|event: (?:error|response\.failed)$)")
"""Event that ends a stream with an error of the upstream."""
_WITH_JSON = media_locations.TABLE.keys() | SALTED
"""Endpoints whose bodies are read as JSON with any media type, if any server may be behind."""
_CONTROL = re.compile(r"[\0-\x1f\x7f]")


@dataclass(slots=True)
class _Exchange:
    scope: Scope
    request: Request
    send: Send
    own: RequestScope
    api: Dialect
    has_begun: bool = False
    """Whether a part of the answer was sent."""
    is_stream: bool = False
    load: LoadReport = field(default_factory=LoadReport)
    referenced: Referenced = field(default_factory=Referenced)
    urls: Sequence[str] = ()
    """Media handles in place of its media."""
    inlined: Inlined | None = None
    """Media that are written into the body."""
    stream: BodyStream | None = None
    """Transfer of the body while it arrives."""
    begun: BegunRequest | None = None
    """The request, if its whole body was sent while it arrived."""
    failure: Exception | None = None
    """Error of a body that was passed on while it arrived."""

    @property
    def id(self) -> str:
        return self.own.id

    @property
    def trace(self) -> Trace:
        return self.own.trace

    @property
    def share(self) -> Share:
        return self.own.share

    @property
    def placement(self) -> bytes:
        """See `UpstreamRequest.placement`."""
        return (self.inlined or self.referenced).placement

    def end_stream(self) -> None:
        """Close the connection of a body that was sent while it arrived."""
        if self.stream is not None:
            self.stream.close()


class Passage:
    """Proxy of requests to all endpoints; an ASGI application."""

    def __init__(
        self,
        store: AsyncDaemonStore,
        gate: Gate,
        upstream: Upstream,
        stage: ReferenceStage,
        settings: AppSettings,
        access: Access,
        scopes: RequestScopes,
        tenancy: Tenancy,
        *,
        inline: InlineStage | None = None,
        files: FileStore | None = None,
    ) -> None:
        """Create it.

        Args:
            files: Store of the files that requests name, if there is one.
            inline: Writes media into bodies, for an upstream that reads no arena.
        """
        self._store, self._gate, self._upstream, self._stage = store, gate, upstream, stage
        self._settings, self._access, self._scopes = settings, access, scopes
        self._load = LoadReports(store, gate)
        self._tenancy, self._inline, self._files = tenancy, inline, files
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
            exchange = _Exchange(scope, request, send, own, api)
            try:
                async with asyncio.timeout_at(own.deadline):
                    try:
                        await self._pass_on(exchange)
                    finally:
                        exchange.end_stream()
            except ClientDisconnect:
                own.leave()
            except Exception as error:
                await self._fail(exchange, own.fail(error))

    # To the upstream

    async def _pass_on(self, exchange: _Exchange) -> None:
        request, trace = exchange.request, exchange.trace
        await exchange.own.admit(request.headers, exchange.scope)
        exchange.load = await self._load.look(exchange.scope["headers"])
        trace.media = "none"
        _check_target(exchange.scope)
        has_json = self._has_json(request)
        self._tenancy.check_path(path_of(request), method=request.method, has_json=has_json)
        if not self._upstream.is_ready:
            raise EngineUnavailable("the engine is not ready; try again")
        body: bytes | RepeatableBody | AsyncIterator[bytes] = b""
        if has_json:
            exchange.stream = self._stream_of(exchange)
            body = await self._refer(exchange)
            if exchange.begun is None:
                exchange.end_stream()
        elif _has_body(request):
            trace.media = "unknown"
            body = self._streamed(exchange)
        trace.where = "engine"
        start_ns = time.monotonic_ns()
        passed = replace(
            self._request_of(exchange),
            body=body,
            placement=exchange.placement,
            begun=exchange.begun,
        )
        try:
            async with self._upstream.forward(passed) as answer:
                repeats = answer.status >= _ERRORS or path_of(request) in media_locations.REPEATING
                if exchange.urls and repeats:
                    answer = without_references(answer, exchange.urls)
                if answer.status >= _FAILURES:
                    await self._stage.explain(exchange.id, exchange.referenced)
                await self._bring_back(exchange, answer, start_ns)
        except EngineUnavailable:
            if exchange.failure is not None:
                raise exchange.failure from None
            raise

    def _has_json(self, request: Request) -> bool:
        """Whether its body may contain media as JSON.

        vLLM takes no JSON with another method or media type; other servers may read it wherever
        they expect it.
        """
        if (
            self._inline is not None
            and self._place_of(request) in _WITH_JSON
            and _has_body(request)
        ):
            return True
        if request.method not in ("POST", "PUT", "PATCH"):
            return False
        kind = request.headers.get("content-type", "").partition(";")[0]
        return "json" in kind.lower() or not kind.strip()

    def _place_of(self, request: Request) -> str:
        """Return the path at which its media are looked for."""
        path = path_of(request)
        if self._inline is None:
            return path
        return media_locations.as_read_by_any_server(plain_path(path))

    def _request_of(self, exchange: _Exchange) -> UpstreamRequest:
        """Return the request as it is passed on now, without its body."""
        trace = exchange.trace
        headers = self._access.headers_to_pass_on(
            exchange.scope["headers"],
            exchange.share,
            is_gateway=not self._upstream.reads_arena,
        )
        return UpstreamRequest(
            method=exchange.request.method,
            target=target_of(exchange.scope),
            headers=headers if trace.root is None else trace.root.carried(headers),
            body=b"",
        )

    def _stream_of(self, exchange: _Exchange) -> BodyStream | None:
        """Return the transfer of a body while it arrives; ``None`` for a body that is short, that
        is changed in any case, or of unknown length.
        """
        least, path = self._upstream.min_streamed_nbytes, path_of(exchange.request)
        nbytes = announced_nbytes(exchange.request) or 0
        if self._inline is None or not 0 < least <= nbytes or exchange.request.method != "POST":
            return None
        if self._tenancy.writes(path, has_media=False):
            return None
        limits = self._settings.limits_of(exchange.share)
        placement_of = partial(self._inline.early_placement, limits=limits)
        return BodyStream(self._upstream, self._request_of(exchange), nbytes, placement_of)

    async def _refer(self, exchange: _Exchange) -> bytes | RepeatableBody:
        """Return the body with media handles in place of its media, or with the media that the
        upstream reads; unchanged without media.
        """
        trace, path, tenant = exchange.trace, path_of(exchange.request), exchange.share.tenant
        place = self._place_of(exchange.request)
        trace.media = "unknown"
        start_ns = time.monotonic_ns()
        reader = BodyReader(
            *(self._store, self._gate, exchange.id),
            *(self._settings.limits_of(exchange.share), media_locations.MEDIA_KEYS),
            tenant=tenant,
            paths=media_locations.paths_at(place),
            knows=partial(self._stage.knows, exchange.id, tenant) if self._inline is None else None,
            early=self._stage.early(exchange.share) if self._inline is None else None,
        )
        stream = exchange.stream
        follow = None if stream is None else partial(stream.follow, reader)
        body = await reader.read(exchange.request, follow)
        if stream is not None:
            stream.end()
        copied = sum(item.nbytes for item in body.media.values())
        trace.stage(start_ns, "read_body", copied_nbytes=copied, note=f"{body.nbytes} bytes")
        trace.media, trace.where = "none", "preprocess"
        start_ns = time.monotonic_ns()
        keeps_form = self._inline is not None
        stage = self._inline or self._stage
        document = media_locations.find(
            *(body.json, place),
            keeps_form=keeps_form,
            has_documents=stage.items.shows_documents,
            has_videos=self._upstream.takes_videos,
            files=await look_up(body.json, self._files, tenant=tenant),
        )
        shown, media = documents_in(document, body), dict(body.media)
        sources = {place.source for place in document.places} | {each.source for each in shown}
        # Now: the items' memory may be reused soon.
        others = self._others(sources, body)
        _check_media(sources, body)
        if shown:
            trace.media = counting.media_of([place.part for place in shown])
            await show(
                *(stage.items, exchange.id, document, shown, media, stage.pages_of(document)),
                share=exchange.share,
                trace=trace,
            )
        if not document.places:
            reader.let_others_come()
            passed = document.write(())
            passed = self._tenancy.write(passed, path, tenant=tenant, has_media=False)
            return media_locations.restore(passed, others)
        trace.stage(start_ns, "parse_json", copied_nbytes=len(body.json))
        trace.media = trace.media if shown else _media_of(document)
        if self._inline is not None:
            inlined = exchange.inlined = await self._inline.read(
                exchange.id, document, media, share=exchange.share, trace=trace
            )
            reader.let_others_come()
            written = inlined.write(document)
            written = self._tenancy.write(written, path, tenant=tenant, has_media=False)
            if stream is not None and inlined.is_as_received(document, body, written):
                exchange.begun = stream.complete(inlined.placement)
            return inlined.body(media_locations.restore(written, others))
        exchange.referenced = await self._stage.refer(
            exchange.id, document, media, share=exchange.share, trace=trace
        )
        reader.let_others_come()
        exchange.urls = [self._upstream.sign(each) for each in exchange.referenced.references]
        written = document.write(exchange.urls, names=exchange.referenced.names)
        written = self._tenancy.write(written, path, tenant=tenant, has_media=True)
        return media_locations.restore(written, others)

    def _others(self, sources: Collection[object], body: ReceivedBody) -> dict[str, bytes]:
        """Return the cut strings that are data and not media, by marker.

        Args:
            sources: URLs and markers of media.
        """
        others = {marker: raw for marker, raw in body.media.items() if marker not in sources}
        return {
            marker: body.cut[marker].written(self._bytes_of(raw)) for marker, raw in others.items()
        }

    def _bytes_of(self, raw: RawMedia) -> bytes | memoryview:
        if raw.is_left_out:
            raise BodyTooLarge(
                "the body is longer than --max-body-nbytes allows, and has data that are known as "
                "media, but not in the place of media"
            )
        if raw.handle is None:
            return raw.data or b""
        return self._store.block(raw.handle)[raw.start : raw.start + raw.nbytes]

    async def _streamed(self, exchange: _Exchange) -> AsyncIterator[bytes]:
        """Yield a body that is not JSON: a file to transcribe, for example."""
        limits, nbytes = self._settings.limits_of(exchange.share), 0
        most = limits.max_body_nbytes
        try:
            async for chunk in timely_chunks(exchange.request, limits):
                nbytes += len(chunk)
                if nbytes > most:
                    raise BodyTooLarge(f"the body has more than {most} bytes (--max-body-nbytes)")
                if chunk:
                    yield chunk
        except (AfferentError, ClientDisconnect) as error:
            exchange.failure = error
            raise

    # From the upstream

    async def _bring_back(self, exchange: _Exchange, answer: UpstreamAnswer, start_ns: int) -> None:
        """Send the bytes as they arrive, once it is certain that they are based on these media."""
        referenced, trace = exchange.referenced, exchange.trace
        exchange.is_stream = _content_type(answer.headers).startswith(b"text/event-stream")
        held = b""
        async for chunk in answer.chunks:
            if not exchange.has_begun:
                held += chunk
                if exchange.is_stream and _is_prelude(held):
                    continue
                trace.stage(start_ns, "first_byte")
                if exchange.inlined is not None:
                    exchange.own.release()  # the upstream has all of the media
                self._gate.leave(exchange.id)  # if the engine's plugin has not reported it
                await self._stage.check(exchange.id, referenced)
                chunk = held
            else:
                self._stage.check_here(referenced)
            if exchange.is_stream and _FAILURE.search(chunk):
                await self._stage.explain(exchange.id, referenced)
            if not exchange.has_begun:
                await self._begin(exchange, answer)
            await exchange.send({"type": "http.response.body", "body": chunk, "more_body": True})
        if not exchange.has_begun:
            await self._stage.check(exchange.id, referenced)
            await self._begin(exchange, answer)
            await exchange.send({"type": "http.response.body", "body": held, "more_body": True})
        await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, exchange: _Exchange, answer: UpstreamAnswer) -> None:
        headers = [(name.lower(), value) for name, value in answer.headers]
        if self._settings.cors_origins:  # they replace the upstream's own
            headers = [each for each in headers if not each[0].startswith(_OF_CORS)]
        headers = with_report(exchange.load.added_to(headers), exchange.trace)
        exchange.has_begun = True
        await exchange.send(
            {"type": "http.response.start", "status": answer.status, "headers": headers}
        )

    # Ends

    async def _fail(self, exchange: _Exchange, failure: AfferentError) -> None:
        """Send an error in the API's format, or as the end of a stream that has begun."""
        if not exchange.has_begun:
            answer = refusal(failure, exchange.id, exchange.api)
            headers = exchange.load.added_to(answer.raw_headers)
            answer.raw_headers = with_report(headers, exchange.trace)
            await answer(exchange.scope, exchange.request.receive, exchange.send)
        elif exchange.is_stream:
            frame = _last_frame(exchange, failure)
            await exchange.send({"type": "http.response.body", "body": frame, "more_body": False})
        else:
            hang_up(exchange.scope)  # so that a client does not take it for complete


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


def _has_body(request: Request) -> bool:
    return "content-length" in request.headers or "transfer-encoding" in request.headers


def _check_media(sources: Collection[object], body: ReceivedBody) -> None:
    """
    Raises:
        InvalidMedia: What was cut out of the body is malformed or too large, and is media.
    """
    for source in sources:
        item = body.cut.get(source) if isinstance(source, str) else None
        if item is not None and item.error is not None:
            raise item.error


def _media_of(document: media_locations.Document) -> str:
    found = {place.modality for place in document.places}
    return str(next(iter(found))) if len(found) == 1 else "mixed"


def _content_type(headers: Headers) -> bytes:
    return next((value for name, value in headers if name.lower() == b"content-type"), b"").lower()


def _is_prelude(text: bytes) -> bool:
    """Whether the stream so far does not depend on its media."""
    return len(_PRELUDE.findall(text)) == len(_EVENT.findall(text)) > 0


def _last_frame(exchange: _Exchange, failure: AfferentError) -> bytes:
    """Return the last frame of a failed stream, with the error in the API's format."""
    answer = refusal(failure, exchange.id, exchange.api)
    head = b"event: error\n" if exchange.api.names_error_events else b""
    return b"\n\n" + head + b"data: " + bytes(answer.body) + b"\n\n"
