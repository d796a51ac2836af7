"""Endpoints for stored files: OpenAI's and Anthropic's Files APIs, at the same paths.

A client of Anthropic sends the header ``anthropic-version``, which decides on the format. Both APIs
show the same files of the client's tenant.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from afferent.errors import FileNotFound, InvalidRequest
from afferent.files.file_store import FileStore, OpenedFile
from afferent.files.stored_file import FILE, StoredFile
from afferent.proxy import counting, file_answers
from afferent.proxy.app_settings import AppSettings
from afferent.proxy.dialects import ANTHROPIC_FILES, FILES
from afferent.proxy.file_form import Form, FormReader, commit
from afferent.proxy.file_uploads import UploadApi
from afferent.proxy.request_scope import RequestScopes
from afferent.proxy.responses import ClosingStream, id_headers, new_id, refusal
from afferent.proxy.scoped_endpoint import Call, ScopedEndpoint, dialect_of
from afferent.proxy.welcome import FILES as PATHS
from afferent.proxy.welcome import NOT_STORED
from afferent.types import MiB

_FILES, _ = PATHS
_PIECE_NBYTES: Final = MiB
_BYTES: Final = "application/octet-stream"
_FORM: Final = file_answers.form("file", purpose={"type": "string"})
_MAX_PAGE, _MAX_ANTHROPIC_PAGE, _MAX_IDS = 10_000, 1000, 100


class FileApi:
    """Endpoints over one store of files."""

    def __init__(self, store: FileStore, scopes: RequestScopes, settings: AppSettings) -> None:
        self._store, self._scopes, self._settings = store, scopes, settings
        counting.APIS.update({FILES.name, ANTHROPIC_FILES.name})

    def routes(self) -> list[Route]:
        one, scopes = f"{_FILES}/{{file_id}}", self._scopes
        create = ScopedEndpoint(scopes, self._create, is_long=True, body=_FORM)
        content = ScopedEndpoint(scopes, self._content, is_long=True, answer_type=_BYTES)
        return [
            Route(_FILES, create, methods=["POST"]),
            Route(_FILES, ScopedEndpoint(scopes, self._list), methods=["GET"]),
            Route(one, ScopedEndpoint(scopes, self._get), methods=["GET"]),
            Route(one, ScopedEndpoint(scopes, self._delete), methods=["DELETE"]),
            Route(f"{one}/content", content, methods=["GET"]),
            *UploadApi(self._store, scopes, self._settings).routes(),
        ]

    async def _create(self, call: Call) -> Response:
        """Store a file."""
        limits = self._settings.limits_of(call.own.share)
        form = await FormReader(call.request, self._store, limits, "file").read(call.tenant)
        complete = self._of_anthropic if call.is_anthropic else self._of_openai
        return _described(call, await commit(self._store, form, complete))

    def _of_openai(self, form: Form) -> Callable[[], StoredFile]:
        purpose = form.fields.get("purpose", "")
        if purpose not in file_answers.PURPOSES:
            known = ", ".join(file_answers.PURPOSES)
            raise InvalidRequest(f"purpose must be one of {known}", param="purpose")
        lives_s = file_answers.openai_lifetime_s(form.fields, purpose)
        return self._completed(form, purpose, lives_s)

    def _of_anthropic(self, form: Form) -> Callable[[], StoredFile]:
        lives_s = file_answers.lifetime_s(form.fields, "expires_in_seconds", most_s=7_776_000)
        return self._completed(form, "user_data", lives_s)

    def _completed(self, form: Form, purpose: str, lives_s: int) -> Callable[[], StoredFile]:
        return partial(
            form.incoming.commit,
            self._store.new_id(FILE, lives_s=lives_s),
            name=form.name,
            media_type=form.media_type,
            purpose=purpose,
        )

    async def _list(self, call: Call) -> Response:
        """List the stored files."""
        return await (self._anthropic_list(call) if call.is_anthropic else self._openai_list(call))

    async def _openai_list(self, call: Call) -> Response:
        query = call.request.query_params
        is_ascending = file_answers.is_ascending(query.get("order"))
        limit = file_answers.number(query.get("limit"), default=_MAX_PAGE, most=_MAX_PAGE)
        page = file_answers.OpenAIPage(limit=limit, purpose=query.get("purpose", ""))
        after = file_answers.cursor(query.get("after"), "after")
        batches = self._store.batches(call.tenant, after=after, is_ascending=is_ascending)
        first = await self._next(batches)  # before the answer begins: it may fail

        async def pieces() -> AsyncIterator[bytes]:
            yield page.begin()
            batch = first
            while batch is not None and not page.is_full:
                yield page.add(batch)
                batch = await self._next(batches)
            yield page.end()

        headers = id_headers(call.own.id)
        return StreamingResponse(pieces(), media_type="application/json", headers=headers)

    async def _anthropic_list(self, call: Call) -> Response:
        query, tenant = call.request.query_params, call.tenant
        if ids := [*query.getlist("ids"), *query.getlist("ids[]")]:
            if len(ids) > _MAX_IDS:
                raise InvalidRequest(f"at most {_MAX_IDS} ids are allowed", param="ids")
            known = await self._store.run(partial(self._store.known, tenant, ids))
            found = sorted(known.values(), key=lambda file: file.id, reverse=True)
            return call.answer(file_answers.anthropic_page(found, has_more=False))
        limit = file_answers.number(query.get("limit"), default=20, most=_MAX_ANTHROPIC_PAGE)
        before = file_answers.cursor(query.get("before_id"), "before_id")
        page = query.get("page", "").removeprefix("page_") or query.get("after_id")
        after = file_answers.cursor(page, "after_id")
        if before and after:
            raise InvalidRequest("before_id and after_id exclude each other", param="before_id")
        batches = self._store.batches(tenant, after=before or after, is_ascending=bool(before))
        found = []
        while len(found) <= limit and (batch := await self._next(batches)) is not None:
            found += batch
        has_more, found = len(found) > limit, found[:limit]
        if before:
            found.reverse()
        return call.answer(file_answers.anthropic_page(found, has_more=has_more))

    async def _next(self, batches: Iterator[list[StoredFile]]) -> list[StoredFile] | None:
        return await self._store.run(partial(next, batches, None))

    async def _get(self, call: Call) -> Response:
        """Describe a stored file."""
        get = partial(self._store.get, call.tenant, call.id("file_id"))
        return _described(call, await self._store.run(get))

    async def _delete(self, call: Call) -> Response:
        """Delete a stored file."""
        id = call.id("file_id")
        await self._store.run(partial(self._store.delete, call.tenant, id))
        if call.is_anthropic:
            return call.answer({"id": id, "type": "file_deleted"})
        return call.answer({"id": id, "object": "file", "deleted": True})

    async def _content(self, call: Call) -> Response:
        """Return the bytes of a stored file."""
        id = call.id("file_id")
        await self._store.run(partial(self._store.get, call.tenant, id))
        open_file = partial(self._store.open, call.tenant, id)
        file = await self._store.run(open_file, undo=OpenedFile.close)
        headers = {
            **id_headers(call.own.id),
            "content-length": str(file.nbytes),
            "content-disposition": file_answers.disposition(file.record.name),
            "x-content-type-options": "nosniff",
        }
        # Never the client's media type: a page of another origin could be shown as one of this.
        if call.request.method == "HEAD":
            file.close()
            return Response(headers=headers, media_type=_BYTES)
        stack = AsyncExitStack()
        stack.callback(file.close)
        return ClosingStream(self._pieces(file), stack, headers=headers, media_type=_BYTES)

    async def _pieces(self, file: OpenedFile) -> AsyncIterator[bytes]:
        pieces = file.pieces(_PIECE_NBYTES)
        while (piece := await self._store.run(partial(next, pieces, None))) is not None:
            yield piece


def _described(call: Call, file: StoredFile) -> Response:
    as_sent = file_answers.anthropic_file if call.is_anthropic else file_answers.openai_file
    return call.answer(as_sent(file))


def file_app(api: FileApi | None) -> ASGIApp:
    """Return an application for all paths of files.

    Args:
        api: ``None`` if the server stores no files.
    """

    async def refuse(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        why = "the endpoint has no such method" if status == 405 else "there is no such endpoint"
        return refused(request, why if api is not None else NOT_STORED, status=status)

    routes = api.routes() if api is not None else []
    app = Starlette(routes=routes, exception_handlers={HTTPException: refuse})
    app.router.redirect_slashes = False
    return app


def refused(request: Request, why: str, *, status: int) -> Response:
    """Return the refusal of a request that no endpoint answers, in the format of its API."""
    dialect = dialect_of(request)
    error = FileNotFound(why) if status == 404 else InvalidRequest(why)
    return refusal(error, new_id(dialect.id_prefix), dialect, status=status)
