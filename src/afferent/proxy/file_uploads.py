"""Endpoints of OpenAI's Uploads API: large files, in parts."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.responses import Response
from starlette.routing import Route

from afferent.errors import InvalidRequest
from afferent.files.file_store import FileStore
from afferent.files.stored_file import MAX_NAME
from afferent.files.uploads import Upload, Uploads
from afferent.proxy import file_answers
from afferent.proxy.app_settings import AppSettings
from afferent.proxy.body import read_small_body
from afferent.proxy.file_form import FormReader, commit, described
from afferent.proxy.request_scope import RequestScopes
from afferent.proxy.scoped_endpoint import Call, ScopedEndpoint
from afferent.proxy.welcome import FILES

_, PATH = FILES
_MAX_PARTS = 10_000


class _ExpiresAfter(Struct):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


class _NewUpload(Struct):
    bytes: Annotated[int, Meta(ge=0)]
    filename: Annotated[str, Meta(max_length=4 * MAX_NAME)]
    mime_type: Annotated[str, Meta(max_length=128)]
    purpose: file_answers.Purpose
    expires_after: _ExpiresAfter | None = None


class _Completion(Struct):
    part_ids: Annotated[list[str], Meta(max_length=_MAX_PARTS)]
    md5: str | None = None


_new = msgspec.json.Decoder(_NewUpload)
_completion = msgspec.json.Decoder(_Completion)


class UploadApi:
    """Endpoints for uploads over one store of files."""

    def __init__(self, store: FileStore, scopes: RequestScopes, settings: AppSettings) -> None:
        self._store, self._scopes, self._settings = store, scopes, settings
        self._uploads = Uploads(store)

    def routes(self) -> list[Route]:
        one, scopes = f"{PATH}/{{upload_id}}", self._scopes
        create = ScopedEndpoint(scopes, self._create, body=_json_of(_NewUpload))
        add = ScopedEndpoint(scopes, self._add_part, is_long=True, body=file_answers.form("data"))
        done = _json_of(_Completion)
        complete = ScopedEndpoint(scopes, self._complete, is_long=True, body=done)
        return [
            Route(PATH, create, methods=["POST"]),
            Route(f"{one}/parts", add, methods=["POST"]),
            Route(f"{one}/complete", complete, methods=["POST"]),
            Route(f"{one}/cancel", ScopedEndpoint(scopes, self._cancel), methods=["POST"]),
        ]

    async def _create(self, call: Call) -> Response:
        """Begin an upload in parts."""
        given = await _body(call, _new)
        name, media_type = described(given.filename, given.mime_type)
        lives_s = given.expires_after.seconds if given.expires_after is not None else 0
        create = partial(
            self._uploads.create,
            call.tenant,
            nbytes=given.bytes,
            name=name,
            media_type=media_type,
            purpose=given.purpose,
            lives_s=lives_s or file_answers.usual_lifetime_s(given.purpose),
        )
        return call.answer(_described(await self._store.run(create)))

    async def _add_part(self, call: Call) -> Response:
        """Add a part to an upload."""
        id = call.id("upload_id")
        # Before the body is read.
        await self._store.run(partial(self._uploads.pending, call.tenant, id))
        limits = self._settings.limits_of(call.own.share)
        form = await FormReader(call.request, self._store, limits, "data").read(call.tenant)
        part = await commit(
            self._store,
            form,
            lambda form: partial(self._uploads.add_part, call.tenant, id, form.incoming),
        )
        return call.answer(
            {
                "id": part.id,
                "object": "upload.part",
                "created_at": part.created_s,
                "upload_id": id,
            }
        )

    async def _complete(self, call: Call) -> Response:
        """Make a file of the parts of an upload."""
        given = await _body(call, _completion)
        complete = partial(
            self._uploads.complete,
            *(call.tenant, call.id("upload_id"), given.part_ids),
            md5=given.md5,
        )
        return call.answer(_described(await self._store.run(complete)))

    async def _cancel(self, call: Call) -> Response:
        """End an upload, and delete its parts."""
        cancel = partial(self._uploads.cancel, call.tenant, call.id("upload_id"))
        return call.answer(_described(await self._store.run(cancel), status="cancelled"))


def _json_of(kind: type[Struct]) -> dict[str, Any]:
    """Return the content of a request for the OpenAPI document, without references."""
    (schema,), parts = msgspec.json.schema_components([kind])
    ref = schema["$ref"].rpartition("/")[2]
    nested = {name: part for name, part in parts.items() if name != ref}
    schema = parts[ref]
    if nested:
        schema["properties"]["expires_after"] = {"anyOf": [{"type": "null"}, *nested.values()]}
    return {"application/json": {"schema": schema}}


async def _body(call: Call, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Read a body of JSON.

    Raises:
        InvalidRequest: It is not of the schema.
    """
    body = await read_small_body(call.request)
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid: {error}") from error


def _described(upload: Upload, *, status: str = "") -> dict[str, Any]:
    return {
        "id": upload.id,
        "object": "upload",
        "bytes": upload.nbytes,
        "created_at": upload.created_s,
        "expires_at": upload.expires_s,
        "filename": upload.name,
        "purpose": upload.purpose,
        "status": status or ("pending" if upload.file is None else "completed"),
        "file": None if upload.file is None else file_answers.openai_file(upload.file),
    }
