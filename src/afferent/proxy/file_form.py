"""Reader of a form (multipart/form-data) with one file, which goes to the store as it arrives."""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from starlette.requests import Request

from afferent.config import RequestLimits
from afferent.errors import BodyTooLarge, InvalidRequest
from afferent.files.file_store import FileStore, Incoming
from afferent.files.stored_file import MAX_NAME, StoredFile
from afferent.media.body.form import MAX_FIELDS_NBYTES, FormCutter, FormType
from afferent.proxy.body import timely_chunks
from afferent.types import KiB, MiB

_PIECE_NBYTES: Final = MiB
"""Bytes in memory before they are written."""
_LEAST_NBYTES_PER_S: Final = 64 * KiB
"""Slowest rate of an upload, after ``body_timeout_s``."""
_MEDIA_TYPE: Final = re.compile(r"[a-z0-9.+-]{1,64}/[a-z0-9.+-]{1,64}")
_UNKNOWN: Final = "application/octet-stream"
_UNPRINTABLE: Final = re.compile(r"[\0-\x1f\x7f]")


@dataclass(slots=True)
class Form:
    """Form that was received.

    Attributes:
        fields: Values of the fields that are no file, by name.
        name: Name of the file.
        media_type: Media type of the file.
    """

    incoming: Incoming
    fields: dict[str, str]
    name: str
    media_type: str


class FormReader:
    """Reads one form. Parts other than the file are short, and stay in memory."""

    def __init__(self, request: Request, store: FileStore, limits: RequestLimits, file_key: str):
        """Create it.

        Args:
            file_key: Name of the field with the file.

        Raises:
            InvalidRequest: The body is no form.
        """
        self._request, self._store, self._limits = request, store, limits
        self._file_key = file_key
        form = FormType.of(request.headers.get("content-type", ""), file_key)
        if form is None:
            raise InvalidRequest("the body must be a form: multipart/form-data with a boundary")
        self._pending = _Pending()
        self._cutter = FormCutter(self._pending, form)

    async def read(self, tenant: str) -> Form:
        """Read the form; the caller commits or aborts the file.

        Raises:
            InvalidRequest: It is malformed, or has no file.
            BodyTooLarge: The file is too large, or the other fields are.
            BodyTooSlow: It does not arrive in time.
            StorageQuotaExceeded: The tenant has no space left.
            FilesUnavailable: The store does not work.
        """
        length = self._request.headers.get("content-length", "")
        announced = int(length) if length.isdecimal() and len(length) < 20 else None
        most = self._store.limits.max_nbytes
        if announced is not None and announced > most + MAX_FIELDS_NBYTES:
            raise BodyTooLarge(f"the file has more than {most} bytes (--files-max-nbytes)")
        begin = partial(self._store.begin, tenant, announced_nbytes=announced)
        incoming = await self._store.run(begin, undo=Incoming.abort)
        try:
            return await self._receive(incoming)
        except BaseException:
            await self._store.run(incoming.abort)
            raise

    async def _receive(self, incoming: Incoming) -> Form:
        rate = _LEAST_NBYTES_PER_S
        async for chunk in timely_chunks(self._request, self._limits, min_nbytes_per_s=rate):
            self._cutter.feed(chunk)
            if len(self._pending.data) >= _PIECE_NBYTES:
                await self._flush(incoming)
        await self._flush(incoming)
        self._cutter.finish()
        file = self._cutter.file
        if file is None:
            raise InvalidRequest("the form has no file", param=self._file_key)
        fields: dict[str, str] = {}
        for part in self._cutter.parts:
            if part is file:
                continue
            if part.name in fields:
                raise InvalidRequest("a field stands twice in the form", param=part.name[:64])
            fields[part.name] = part.value.decode(errors="replace")
        name = file.file_name.decode(errors="replace")
        media_type = file.header(b"content-type").decode("latin-1")
        return Form(incoming, fields, *described(name, media_type))

    async def _flush(self, incoming: Incoming) -> None:
        if data := self._pending.take():
            await self._store.run(partial(incoming.write, data))


class _Pending:
    """Bytes of the file that have come and are not written."""

    def __init__(self) -> None:
        self.data = bytearray()

    def begin(self) -> None:
        """Do nothing: there is one file."""

    def write(self, data: bytes) -> None:
        self.data += data

    def end(self) -> None:
        """Do nothing: `FormReader` writes what is left."""

    def take(self) -> bytes:
        """Return the bytes, and forget them."""
        taken, self.data = bytes(self.data), bytearray()
        return taken


async def commit(
    store: FileStore, form: Form, complete: Callable[[Form], Callable[[], StoredFile]]
) -> StoredFile:
    """Complete the file of a form, or drop it if ``complete`` refuses the form.

    Args:
        complete: Checks the fields; what it returns is called in a thread.
    """
    try:
        return await store.run(complete(form))
    except BaseException:
        await store.run(form.incoming.abort)
        raise


def described(name: str, media_type: str) -> tuple[str, str]:
    """Return the name and the media type of a file, of what a client has sent."""
    name = _UNPRINTABLE.sub("", re.split(r"[/\\]", name)[-1]).strip()[-MAX_NAME:]
    media_type = media_type.partition(";")[0].strip().lower()
    if not _MEDIA_TYPE.fullmatch(media_type) or media_type == _UNKNOWN:
        media_type = mimetypes.guess_type(name)[0] or _UNKNOWN
    suffix = "" if media_type == _UNKNOWN else mimetypes.guess_extension(media_type)
    return name or f"unnamed{suffix or ''}", media_type
