"""Cutter of the file from a form (multipart/form-data) while it arrives."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from afferent.errors import BodyTooLarge, InvalidRequest
from afferent.media.body.cutter import CutBody, CutMedia, MediaSink
from afferent.types import KiB

MAX_FIELDS_NBYTES: Final = 64 * KiB
"""Most bytes of a form beside its file."""
_MAX_PARTS: Final = 32
_MAX_HEADER_NBYTES: Final = 8 * KiB
_MAX_FALSE: Final = 1000
"""Most places where a file may have the boundary without its end: each costs much to search."""
_TOO_LARGE: Final = f"the form has more than {MAX_FIELDS_NBYTES} bytes beside its file"
_MAX_BOUNDARY_NBYTES: Final = 256
_PLAIN: Final = ("", "binary", "8bit", "7bit")


@dataclass(slots=True)
class FormPart:
    """Part of a form.

    Attributes:
        headers: Names in lower case, and values.
        name: Name of the field; empty until the headers are complete.
        file_name: Name of the file.
        value: Value of a field that is not the file.
    """

    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    name: str = ""
    file_name: bytes = b""
    is_file: bool = False
    value: bytearray = field(default_factory=bytearray)

    def header(self, name: bytes) -> bytes:
        """Return the value of a header; empty if it is missing."""
        return b"".join(value for each, value in self.headers if each == name)


@dataclass(frozen=True, slots=True)
class FormType:
    """Description of a form, as its request gives it.

    Attributes:
        boundary: Bytes between the parts.
        file_key: Name of the field with the file.
    """

    boundary: bytes
    file_key: str

    @classmethod
    def of(cls, content_type: str, file_key: str) -> FormType | None:
        """Return the description; ``None`` if the body is no form, or has no valid boundary."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        is_form = kind == b"multipart/form-data" and 0 < len(boundary) <= _MAX_BOUNDARY_NBYTES
        return cls(boundary, file_key) if is_form else None


class FormCutter:
    """Cuts the file out of one form, fed in chunks of any size. Other parts are short, and stay in
    memory.

    After an error the cutter is unusable.

    Attributes:
        parts: The parts so far, in order.
    """

    is_text: Final = True
    """Whether the file comes as it is, and not as base64; see `BodyCutter.is_text`."""
    first_head: Final = ""
    """See `BodyCutter.first_head`."""

    def __init__(self, sink: MediaSink, form: FormType) -> None:
        """Create it.

        Args:
            sink: Destination of the file, which is one item.
        """
        self._sink, self._form = sink, form
        self.parts: list[FormPart] = []
        self._header = b""
        self._value = b""
        self._num_fed = self._file_nbytes = self._fields_nbytes = self._num_false = 0
        self._is_complete = False
        self._parser = MultipartParser(
            form.boundary,
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

    @property
    def file(self) -> FormPart | None:
        """Part of the file, without its bytes; ``None`` if it has not come."""
        return next((part for part in self.parts if part.is_file), None)

    @property
    def text(self) -> bytearray:
        """Values of the other parts, as far as they have come; not to be kept."""
        return bytearray().join(part.value for part in self.parts)

    def feed(self, chunk: bytes | memoryview) -> None:
        """Process the body's next bytes.

        Raises:
            InvalidRequest: The form is malformed.
            BodyTooLarge: There are too many bytes beside the file.
        """
        data = bytes(chunk)
        self._num_false += data.count(b"\r\n--" + self._form.boundary)
        if self._num_false > _MAX_FALSE + _MAX_PARTS:
            raise InvalidRequest("the form has its boundary too often")
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest("the form is malformed") from error
        self._num_fed += len(data)
        # Of a form that may be right, the parser holds no more back than these.
        beside = self._num_fed - self._file_nbytes - self._fields_nbytes
        if beside > MAX_FIELDS_NBYTES:
            raise BodyTooLarge(_TOO_LARGE)

    def finish(self) -> CutBody:
        """Complete the form, and return it with a marker in place of the file's bytes.

        Raises:
            InvalidRequest: It broke off.
        """
        if not self._is_complete:
            raise InvalidRequest("the form is incomplete: its last boundary is missing")
        marker = f"afferent-media:{secrets.token_hex(16)}:0"
        form = _written(self._form.boundary, self.parts, marker.encode())
        media = [CutMedia(0, marker, "", self._file_nbytes)] if self.file is not None else []
        return CutBody(form, media)

    # Callbacks of the parser

    def _begin_part(self) -> None:
        if len(self.parts) == _MAX_PARTS:
            raise InvalidRequest(f"the form has more than {_MAX_PARTS} parts")
        self.parts.append(FormPart())

    def _add_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end].lower()
        self._count_header(end - start)

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._count_header(end - start)

    def _end_header(self) -> None:
        self.parts[-1].headers.append((self._header, self._value))
        self._header = self._value = b""

    def _end_headers(self) -> None:
        part = self.parts[-1]
        kind, options = parse_options_header(_text(part.header(b"content-disposition")))
        part.name = options.get(b"name", b"").decode(errors="replace")
        if kind != b"form-data" or not part.name:
            raise InvalidRequest("a part of the form has no name")
        encoding = _text(part.header(b"content-transfer-encoding")).lower().strip()
        if encoding not in _PLAIN:
            raise InvalidRequest("a part of the form has a content-transfer-encoding")
        if part.name == self._form.file_key:
            if self.file is not None:
                raise InvalidRequest("the form has more than one file", param=self._form.file_key)
            part.is_file, part.file_name = True, options.get(b"filename", b"")
            self._sink.begin()

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self.parts[-1].is_file:
            self._file_nbytes += end - start
            self._sink.write(data[start:end])
            return
        self._count(end - start)
        self.parts[-1].value += data[start:end]

    def _end_part(self) -> None:
        if self.parts[-1].is_file:
            self._sink.end()

    def _end(self) -> None:
        self._is_complete = True

    def _count_header(self, nbytes: int) -> None:
        self._count(nbytes)
        if len(self._header) + len(self._value) > _MAX_HEADER_NBYTES:
            raise InvalidRequest("a part of the form has a long header")

    def _count(self, nbytes: int) -> None:
        self._fields_nbytes += nbytes
        if self._fields_nbytes > MAX_FIELDS_NBYTES:
            raise BodyTooLarge(_TOO_LARGE)


def _written(boundary: bytes, parts: Sequence[FormPart], file: bytes) -> bytes:
    """Return a form with ``file`` as the bytes of its file."""
    pieces: list[bytes] = []
    for part in parts:
        pieces += (b"--", boundary, b"\r\n")
        for name, value in part.headers:
            pieces += (name, b": ", value, b"\r\n")
        pieces += (b"\r\n", file if part.is_file else bytes(part.value), b"\r\n")
    return b"".join([*pieces, b"--", boundary, b"--\r\n"])


def _text(value: bytes) -> str:
    return value.decode("latin-1")
