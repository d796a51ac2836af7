"""Parser of a request's head: the request line and the fields, up to the empty line.

The grammar is smaller than that of RFC 9112: the parser refuses a request that two programs could
read differently. See `docs/adr/0037-http-server.md`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from afferent.types import KiB

MAX_HEAD_NBYTES: Final = 64 * KiB
MAX_FIELDS: Final = 256
END: Final = b"\r\n\r\n"

_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
_REQUEST_LINE: Final = re.compile(rb"(%b{1,32}) ([!\"$-~]+) HTTP/1\.([01])" % _TOKEN)
_FIELD: Final = re.compile(rb"(%b{1,256}):[ \t]*([\t -~\x80-\xff]*)" % _TOKEN)
_ABSOLUTE: Final = re.compile(rb"(?i:http)://([^/?]+)(.*)")
_HOST: Final = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+;=%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")
_REFLECTING: Final = frozenset((b"CONNECT", b"TRACE"))
"""Methods that are refused: an upstream's answer to ``TRACE`` would contain its key."""
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_CONTROL: Final = re.compile(rb"%(?:[01][0-9A-Fa-f]|7[Ff]|[Cc]2%[89][0-9A-Fa-f])")
"""Control characters in a path, encoded. A router whose patterns end in ``$`` drops a last LF."""
_BARE_LF: Final = re.compile(rb"(?<!\r)\n")

_SINGLE: Final = frozenset(
    (
        *(b"authorization", b"content-length", b"content-type", b"content-encoding"),
        *(b"expect", b"host", b"origin", b"transfer-encoding", b"upgrade"),
    )
)
"""Fields that may occur once only: a proxy could use the second one where this server uses the
first.
"""

Fields = list[tuple[bytes, bytes]]


class BadRequest(Exception):
    """Request that is refused before any application sees it."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.status = message, status


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Request up to its body.

    Attributes:
        version: ``"1.0"`` or ``"1.1"``.
        path: The path as the client wrote it, percent-encoded.
        fields: Names, in lower case, and values, in their order.
        length: Bytes of the body; ``None``: the body is chunked.
        keep_alive: Whether the client allows another request on the connection.
        expects_continue: Whether the client waits for ``100 Continue``.
        is_websocket: Whether the client requests a WebSocket, as RFC 6455 4.1 requires.
    """

    method: str
    path: bytes
    query: bytes
    version: str
    fields: Fields
    length: int | None
    keep_alive: bool
    expects_continue: bool
    is_websocket: bool


def parse_head(data: bytes, *, single: Collection[bytes] = ()) -> Head:
    """Parse a head.

    Args:
        data: The bytes from the request line to the last field, without the final empty line.
        single: Names, in lower case, of further fields that may occur at most once.

    Raises:
        BadRequest: The server does not accept this head.
    """
    first, *lines = data.split(b"\r\n")
    if (request := _REQUEST_LINE.fullmatch(first)) is None:
        raise BadRequest("this is not an HTTP/1.1 request line")
    if request[1] in _REFLECTING or request[1] != request[1].upper():
        # Upstreams and their clients may take `post` for `POST`; rules for bodies would not.
        raise BadRequest("the server does not take this method")
    if len(lines) > MAX_FIELDS:
        raise BadRequest(f"the head has more than {MAX_FIELDS} fields", status=431)
    fields = [_field(line) for line in lines]
    by_name = dict(fields)
    if len(by_name) < len(fields):
        _refuse_second(fields, single)
    version = "1." + request[3].decode()
    path, query = _target(request[2], _host(by_name, version))
    options = {option.strip() for option in _all(fields, b"connection").lower().split(b",")}
    length = _length(by_name, version)
    return Head(
        method=request[1].decode(),
        path=path,
        query=query,
        version=version,
        fields=fields,
        length=length,
        keep_alive=version == "1.1" and b"close" not in options,
        expects_continue=_expects_continue(by_name, version),
        is_websocket=(
            request[1] == b"GET"
            and version == "1.1"
            and length == 0
            and b"upgrade" in options
            and by_name.get(b"upgrade", b"").lower() == b"websocket"
        ),
    )


def has_bare_lf(data: bytes | bytearray, pos: int) -> bool:
    """Return whether a line ends with LF alone, from a position on: such a head never gets the
    expected end.
    """
    return _BARE_LF.search(data, pos) is not None


def parse_field(line: bytes) -> tuple[bytes, bytes] | None:
    """Return the name, in lower case, and the value of a field; ``None`` for a malformed line."""
    if (match := _FIELD.fullmatch(line)) is None:
        return None
    return match[1].lower(), match[2].rstrip(b" \t")


def _field(line: bytes) -> tuple[bytes, bytes]:
    if (field := parse_field(line)) is None:
        raise BadRequest("a header field is malformed")
    return field


def _refuse_second(fields: Fields, single: Collection[bytes]) -> None:
    seen = set[bytes]()
    for name, _ in fields:
        if name in seen and (name in _SINGLE or name in single):
            raise BadRequest(f"the head has two {name.decode()} fields")
        seen.add(name)


def _host(by_name: dict[bytes, bytes], version: str) -> bytes | None:
    host = by_name.get(b"host")
    if host is None and version == "1.0":
        return None
    if host is None or _HOST.fullmatch(host) is None:
        raise BadRequest("a request names one host")
    return host


def _target(target: bytes, host: bytes | None) -> tuple[bytes, bytes]:
    """Return path and query of a target in origin form, or in absolute form for the same host."""
    if (absolute := _ABSOLUTE.fullmatch(target)) is not None:
        if host is None or absolute[1].lower() != host.lower():
            raise BadRequest("the target names another host than the Host field")
        target = absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]
    if not target.startswith(b"/"):
        raise BadRequest("the target is not a path")
    path, _, query = target.partition(b"?")
    if _CONTROL.search(path) is not None:
        raise BadRequest("the path has a control character")
    return path, query


def _length(by_name: dict[bytes, bytes], version: str) -> int | None:
    coding, length = by_name.get(b"transfer-encoding"), by_name.get(b"content-length")
    if coding is not None:
        if version == "1.0" or length is not None or coding.lower() != b"chunked":
            raise BadRequest("a body is chunked, or has a length")
        return None
    if length is None:
        return 0
    if _LENGTH.fullmatch(length) is None:
        raise BadRequest("the content length is not a number")
    return int(length)


def _expects_continue(by_name: dict[bytes, bytes], version: str) -> bool:
    expected = by_name.get(b"expect")
    if expected is None or version == "1.0":
        return False
    if expected.lower() != b"100-continue":
        raise BadRequest("the expectation is not known", status=417)
    return True


def _all(fields: Fields, name: bytes) -> bytes:
    return b",".join(value for each, value in fields if each == name)
