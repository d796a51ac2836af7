"""Body of a request as an upstream gets it: with media handles in place of its media, or with the
media that the upstream reads.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from starlette.requests import ClientDisconnect, Request

from afferent.admission.gate import Gate
from afferent.config import RequestLimits
from afferent.engines.upstream import BegunRequest, RepeatableBody, Upstream, UpstreamRequest
from afferent.errors import AfferentError, BodyTooLarge
from afferent.files.file_store import FileStore
from afferent.items.file_ids import look_up
from afferent.items.request import MediaPart
from afferent.media.body.form import FormType
from afferent.media.body.raw import RawMedia
from afferent.media.body.received import ReceivedBody
from afferent.proxy import counting, media_locations
from afferent.proxy.app_settings import AppSettings
from afferent.proxy.body import BodyReader, announced_nbytes, timely_chunks
from afferent.proxy.body_stream import BodyStream
from afferent.proxy.inline_stage import InlineStage
from afferent.proxy.media_locations import Document
from afferent.proxy.reference_stage import Referenced, ReferenceStage
from afferent.proxy.request_scope import RequestScope
from afferent.proxy.shown_documents import documents_in, show
from afferent.proxy.tenancy import AUDIO_FORMS, SALTED, Tenancy, plain_path
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.types import Modality

_WITH_JSON: Final = media_locations.TABLE.keys() | SALTED
"""Endpoints whose bodies are read as JSON with any media type, if any server may be behind."""
_FILE_KEY: Final = "file"
"""Field of an `AUDIO_FORMS` request with its file."""


@dataclass(frozen=True, slots=True)
class PassedBody:
    """Body of a request, ready for the upstream.

    Attributes:
        content: Its bytes.
        referenced: Objects of the media handles in it.
        urls: The media handles.
        placement: See `UpstreamRequest.placement`.
        begun: The request, if its whole body was sent while it arrived.
        has_media: Whether it contains media themselves.
        is_repeated: Whether the answer repeats parts of it.
    """

    content: bytes | RepeatableBody | AsyncIterator[bytes] = b""
    referenced: Referenced = field(default_factory=Referenced)
    urls: Sequence[str] = ()
    placement: bytes = b""
    begun: BegunRequest | None = None
    has_media: bool = False
    is_repeated: bool = False


class ClientBody:
    """Body that is neither JSON nor a form with audio, passed on while it arrives.

    Attributes:
        failure: Error that ended it, if there was one.
    """

    def __init__(self, request: Request, limits: RequestLimits) -> None:
        self._request, self._limits = request, limits
        self.failure: Exception | None = None

    async def chunks(self) -> AsyncIterator[bytes]:
        nbytes, most = 0, self._limits.max_body_nbytes
        try:
            async for chunk in timely_chunks(self._request, self._limits):
                nbytes += len(chunk)
                if nbytes > most:
                    raise BodyTooLarge(f"the body has more than {most} bytes (--max-body-nbytes)")
                if chunk:
                    yield chunk
        except (AfferentError, ClientDisconnect) as error:
            self.failure = error
            raise


class BodyStage:
    """Reads the JSON of requests, and brings its media to where the upstream reads them."""

    def __init__(
        self,
        store: AsyncDaemonStore,
        gate: Gate,
        upstream: Upstream,
        references: ReferenceStage,
        settings: AppSettings,
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
        self._store, self._gate, self._upstream = store, gate, upstream
        self._references, self._inline = references, inline
        self._settings, self._tenancy, self._files = settings, tenancy, files

    def has_json(self, request: Request, path: str) -> bool:
        """Whether a body may contain media as JSON.

        vLLM takes no JSON with another method or media type; other servers may read it wherever
        they expect it.
        """
        if self._inline is not None and self._place_of(path) in _WITH_JSON and has_body(request):
            return True
        if request.method not in ("POST", "PUT", "PATCH"):
            return False
        kind = request.headers.get("content-type", "").partition(";")[0]
        return "json" in kind.lower() or not kind.strip()

    def has_file(self, request: Request, path: str) -> bool:
        """Whether a body is a form whose file goes to the upstream by its media handle."""
        return self._form_of(request, path) is not None

    def _form_of(self, request: Request, path: str) -> FormType | None:
        if self._inline is not None or request.method != "POST" or path not in AUDIO_FORMS:
            return None
        return FormType.of(request.headers.get("content-type", ""), _FILE_KEY)

    @asynccontextmanager
    async def ready(
        self, request: Request, path: str, own: RequestScope, passed: Callable[[], UpstreamRequest]
    ) -> AsyncIterator[PassedBody]:
        """Yield the body of a request with JSON or a file; unchanged without media.

        Its objects are pinned under the request. The end of the context closes the connection of a
        body that was sent while it arrived.

        Args:
            passed: Returns the request as it is passed on, without its body.
        """
        stream = self._stream_of(request, path, own, passed)
        if stream is None:
            yield await self._prepare(request, path, own, None)
            return
        with closing(stream):
            body = await self._prepare(request, path, own, stream)
            if body.begun is None:
                stream.close()
            yield body

    def _place_of(self, path: str) -> str:
        """Return the path at which the media of requests to this path are looked for."""
        if self._inline is None:
            return path
        return media_locations.as_read_by_any_server(plain_path(path))

    def _stream_of(
        self, request: Request, path: str, own: RequestScope, passed: Callable[[], UpstreamRequest]
    ) -> BodyStream | None:
        """Return the transfer of a body while it arrives; ``None`` for a body that is short, that
        is changed in any case, or of unknown length.
        """
        least, nbytes = self._upstream.min_streamed_nbytes, announced_nbytes(request) or 0
        if self._inline is None or not 0 < least <= nbytes or request.method != "POST":
            return None
        if self._tenancy.writes(path, has_media=False):
            return None
        limits = self._settings.limits_of(own.share)
        placement_of = partial(self._inline.early_placement, limits=limits)
        return BodyStream(self._upstream, passed(), nbytes, placement_of)

    async def _prepare(
        self, request: Request, path: str, own: RequestScope, stream: BodyStream | None
    ) -> PassedBody:
        place, trace = self._place_of(path), own.trace
        trace.media = "unknown"
        start_ns = time.monotonic_ns()
        form = self._form_of(request, path)
        reader = self._reader_of(own, place, form)
        follow = None if stream is None else partial(stream.follow, reader)
        received = await reader.read(request, follow)
        if stream is not None:
            stream.end()
        copied = sum(item.nbytes for item in received.media.values())
        note = f"{received.nbytes} bytes"
        trace.stage(start_ns, "read_body", copied_nbytes=copied, note=note)
        trace.media, trace.where = "none", "preprocess"
        if form is not None:
            return await self._refer_file(own, received, reader)
        parsed = await self._parsed(received, path, place, own)
        if not parsed.document.places:
            reader.let_others_come()
            return PassedBody(parsed.restored(self._written(parsed, parsed.document.write(()))))
        if self._inline is None:
            return await self._refer(parsed, reader)
        return await self._write_in(self._inline, parsed, reader, stream)

    def _reader_of(self, own: RequestScope, place: str, form: FormType | None) -> BodyReader:
        makes_features, tenant = self._inline is None and form is None, own.share.tenant
        return BodyReader(
            *(self._store, self._gate, own.id),
            *(self._settings.limits_of(own.share), media_locations.MEDIA_KEYS),
            tenant=tenant,
            paths=media_locations.paths_at(place),
            knows=partial(self._references.knows, own.id, tenant) if makes_features else None,
            early=self._references.early(own.share) if makes_features else None,
            form=form,
            heap=self._references.items.heap if makes_features else None,
        )

    async def _parsed(
        self, received: ReceivedBody, path: str, place: str, own: RequestScope
    ) -> _Parsed:
        """Find the media in the JSON; documents become their pages."""
        trace, start_ns = own.trace, time.monotonic_ns()
        stage = self._inline or self._references
        document = media_locations.find(
            *(received.json, place),
            keeps_form=self._inline is not None,
            has_documents=stage.items.shows_documents,
            has_videos=self._upstream.takes_videos,
            files=await look_up(received.json, self._files, tenant=own.share.tenant),
        )
        shown, media = documents_in(document, received), dict(received.media)
        sources = {place.source for place in document.places} | {each.source for each in shown}
        # Now: the items' memory may be reused soon.
        others = self._others(sources, received)
        _check_media(sources, received)
        if shown:
            trace.media = counting.media_of([place.part for place in shown])
            await show(stage.items, own, document, shown, media, stage.pages_of(document))
        if document.places:
            trace.stage(start_ns, "parse_json", copied_nbytes=len(received.json))
            trace.media = trace.media if shown else _media_of(document)
        return _Parsed(own, path, received, document, media, others)

    async def _refer(self, parsed: _Parsed, reader: BodyReader) -> PassedBody:
        """Put media handles in the place of the media."""
        document = parsed.document
        referenced = await self._references.refer(parsed.own, document, parsed.media)
        reader.let_others_come()
        urls = [self._upstream.sign(each) for each in referenced.references]
        written = document.write(urls, names=referenced.names)
        written = self._written(parsed, written, has_media=True)
        return PassedBody(
            parsed.restored(written),
            *(referenced, urls, referenced.placement),
            is_repeated=parsed.path in media_locations.REPEATING,
        )

    async def _refer_file(
        self, own: RequestScope, received: ReceivedBody, reader: BodyReader
    ) -> PassedBody:
        """Put a media handle in the place of a form's file; a form without one stays as it is."""
        if not received.media:
            reader.let_others_come()
            return PassedBody(received.json)
        ((marker, raw),) = received.media.items()
        own.trace.media = Modality.AUDIO
        referenced = await self._references.refer_file(own, MediaPart(Modality.AUDIO, raw))
        reader.let_others_come()
        urls = [self._upstream.sign(each) for each in referenced.references]
        (url,) = urls
        content = received.json.replace(marker.encode(), url.encode())
        return PassedBody(content, referenced, urls, referenced.placement)

    async def _write_in(
        self, inline: InlineStage, parsed: _Parsed, reader: BodyReader, stream: BodyStream | None
    ) -> PassedBody:
        """Write the media into the body, in the form that the upstream reads."""
        document = parsed.document
        inlined = await inline.read(parsed.own, document, parsed.media)
        reader.let_others_come()
        written = self._written(parsed, inlined.write(document))
        begun = None
        if stream is not None and inlined.is_as_received(document, parsed.received, written):
            begun = stream.complete(inlined.placement)
        return PassedBody(
            inlined.body(parsed.restored(written)),
            placement=inlined.placement,
            begun=begun,
            has_media=True,
        )

    def _written(self, parsed: _Parsed, json: bytes, *, has_media: bool = False) -> bytes:
        """Return the JSON with the fields that keep tenants apart.

        Args:
            has_media: Whether it has media handles.
        """
        tenant = parsed.own.share.tenant
        return self._tenancy.write(json, parsed.path, tenant=tenant, has_media=has_media)

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
        return raw.bytes_in(self._store)


@dataclass(frozen=True, slots=True)
class _Parsed:
    """JSON whose media were found.

    Attributes:
        media: Media that were cut out of the body, by marker.
        others: Cut strings that are no media, by marker.
    """

    own: RequestScope
    path: str
    received: ReceivedBody
    document: Document
    media: dict[str, RawMedia]
    others: dict[str, bytes]

    def restored(self, written: bytes) -> bytes:
        """Return the JSON with the cut strings that are no media."""
        return media_locations.restore(written, self.others)


def has_body(request: Request) -> bool:
    """Whether a request announces a body."""
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


def _media_of(document: Document) -> str:
    found = {place.modality for place in document.places}
    return str(next(iter(found))) if len(found) == 1 else "mixed"
