"""Reader of a form (multipart/form-data) with one file, which goes to the store as it arrives."""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from afferent.config import RequestLimits
from afferent.errors import BodyTooLarge, InvalidRequest
from afferent.files.file_store import FileStore, Incoming
from afferent.files.stored_file import MAX_NAME, StoredFile
from afferent.proxy.body import timely_chunks
from afferent.types import KiB, MiB

_PIECE_NBYTES: Final = MiB
"""Bytes in memory before they are written."""
_MAX_FIELDS, _MAX_FIELDS_NBYTES = 32, 64 * KiB
_LEAST_NBYTES_PER_S: Final = 64 * KiB
"""Slowest rate of an upload, after ``body_timeout_s``."""
_MEDIA_TYPE: Final = re.compile(r"[a-z0-9.+-]{1,64}/[a-z0-9.+-]{1,64}")
_UNKNOWN: Final = "application/octet-stream"
_UNPRINTABLE: Final = re.compile(r"[\0-\x1f\x7f]")
_PLAIN: Final = ("", "binary", "8bit", "7bit")


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


@dataclass(slots=True)
class _Part:
    """Part that is being received; ``name`` is empty until its headers are complete."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    name: str = ""
    is_file: bool = False
    value: bytearray = field(default_factory=bytearray)


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
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not 0 < len(boundary) <= 256:
            raise InvalidRequest("the body must be a form: multipart/form-data with a boundary")
        self._part, self._header = _Part(), b""
        self._fields: dict[str, str] = {}
        self._file: _Part | None = None
        self._pending = bytearray()
        self._num_fields = self._fields_nbytes = 0
        self._is_complete = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
                "on_header_field": self._add_header,
                "on_header_value": self._add_header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_end": self._end,
            },
        )

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
        if announced is not None and announced > most + _MAX_FIELDS_NBYTES:
            raise BodyTooLarge(f"the file has more than {most} bytes (--files-max-nbytes)")
        begin = partial(self._store.begin, tenant, announced_nbytes=announced)
        incoming = await self._store.run(begin, undo=Incoming.abort)
        try:
            await self._receive(incoming)
        except BaseException:
            await self._store.run(incoming.abort)
            raise
        file = self._file or _Part()
        name = file.headers.get(b"filename", b"").decode(errors="replace")
        media_type = file.headers.get(b"content-type", b"").decode("latin-1")
        return Form(incoming, self._fields, *described(name, media_type))

    async def _receive(self, incoming: Incoming) -> None:
        rate = _LEAST_NBYTES_PER_S
        async for chunk in timely_chunks(self._request, self._limits, min_nbytes_per_s=rate):
            try:
                self._parser.write(chunk)
            except FormParserError as error:
                raise InvalidRequest("the form is malformed") from error
            if len(self._pending) >= _PIECE_NBYTES:
                await self._flush(incoming)
        await self._flush(incoming)
        if not self._is_complete:
            raise InvalidRequest("the form is incomplete: its last boundary is missing")
        if self._file is None:
            raise InvalidRequest("the form has no file", param=self._file_key)

    async def _flush(self, incoming: Incoming) -> None:
        data, self._pending = bytes(self._pending), bytearray()
        if data:
            await self._store.run(partial(incoming.write, data))

    # Callbacks of the parser

    def _begin_part(self) -> None:
        self._part = _Part()

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end].lower()

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        headers = self._part.headers
        headers[self._header] = headers.get(self._header, b"") + data[start:end]

    def _end_header(self) -> None:
        self._header = b""

    def _end_headers(self) -> None:
        part = self._part
        kind, options = parse_options_header(_text(part.headers.get(b"content-disposition", b"")))
        part.name = options.get(b"name", b"").decode(errors="replace")
        if kind != b"form-data" or not part.name:
            raise InvalidRequest("a part of the form has no name")
        encoding = _text(part.headers.get(b"content-transfer-encoding", b"")).lower().strip()
        if encoding not in _PLAIN:
            raise InvalidRequest("a part of the form has a content-transfer-encoding")
        part.is_file = part.name == self._file_key
        if part.is_file:
            if self._file is not None:
                raise InvalidRequest("the form has more than one file", param=self._file_key)
            part.headers[b"filename"] = options.get(b"filename", b"")
            self._file = part
        self._num_fields += 1
        if self._num_fields > _MAX_FIELDS:
            raise InvalidRequest(f"the form has more than {_MAX_FIELDS} parts")

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._part.is_file:
            self._pending += memoryview(data)[start:end]
            return
        self._fields_nbytes += end - start
        if self._fields_nbytes > _MAX_FIELDS_NBYTES:
            raise BodyTooLarge(f"the form has more than {_MAX_FIELDS_NBYTES} bytes beside its file")
        self._part.value += data[start:end]

    def _end_part(self) -> None:
        part = self._part
        if not part.is_file:
            if part.name in self._fields:
                raise InvalidRequest("a field stands twice in the form", param=part.name[:64])
            self._fields[part.name] = part.value.decode(errors="replace")

    def _end(self) -> None:
        self._is_complete = True


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


def _text(value: bytes) -> str:
    return value.decode("latin-1")


def described(name: str, media_type: str) -> tuple[str, str]:
    """Return the name and the media type of a file, of what a client has sent."""
    name = _UNPRINTABLE.sub("", re.split(r"[/\\]", name)[-1]).strip()[-MAX_NAME:]
    media_type = media_type.partition(";")[0].strip().lower()
    if not _MEDIA_TYPE.fullmatch(media_type) or media_type == _UNKNOWN:
        media_type = mimetypes.guess_type(name)[0] or _UNKNOWN
    suffix = "" if media_type == _UNKNOWN else mimetypes.guess_extension(media_type)
    return name or f"unnamed{suffix or ''}", media_type
