"""Requests that a proxy and a server could read differently, and the required answers.

- `UPGRADES` have a body and ask for another protocol: each is answered once, with its body.
- `ACCEPTED` have exactly one body each.
- `REFUSED` are refused, and nothing behind them is read as a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_POST: Final = b"POST /read HTTP/1.1\r\nHost: a\r\n"
_GET: Final = b"GET /read HTTP/1.1\r\nHost: a\r\n"
_CHUNKED: Final = _POST + b"Transfer-Encoding: chunked\r\n"
_SMUGGLED: Final = b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Case:
    """A request, and the length of its body; ``None`` if it is refused."""

    name: str
    data: bytes
    nbytes: int | None


def upgrades_around(body: bytes) -> list[Case]:
    """Return 25 requests: ways to ask for an upgrade, each with this body."""
    asked = {
        "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
        "websocket, complete": b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
        "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABk\r\n",
        "anything": b"Connection: Upgrade\r\nUpgrade: anything\r\n",
        "list": b"Connection: keep-alive, upgrade\r\nUpgrade: foo, websocket\r\n",
        "upper case": b"CONNECTION: UPGRADE\r\nUPGRADE: WEBSOCKET\r\n",
        "TLS": b"Connection: Upgrade\r\nUpgrade: TLS/1.0\r\n",
        "empty": b"Connection: Upgrade\r\nUpgrade:\r\n",
    }
    length = b"Content-Length: %d\r\n\r\n" % len(body) + body
    chunks = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (
        len(_SMUGGLED),
        _SMUGGLED,
    )
    cases = []
    for name, fields in asked.items():
        for method, framed, how in (
            (_POST, length, "POST, length"),
            (_POST, chunks, "POST, chunks"),
            (_GET, length, "GET, length"),
        ):
            cases.append(Case(f"{name}: {how}", method + fields + framed, len(body)))
    alone = _POST + b"Upgrade: websocket\r\n" + length  # without `Connection`
    return [*cases, Case("without Connection", alone, len(body))]


UPGRADES: Final = upgrades_around(_SMUGGLED)

ACCEPTED: Final = [
    Case("no body", _GET + b"\r\n", 0),
    Case("no body, POST", _POST + b"\r\n", 0),
    Case("length", _POST + b"Content-Length: 5\r\n\r\nhello", 5),
    Case("length 0", _POST + b"Content-Length: 0\r\n\r\n", 0),
    Case("length with zeros", _POST + b"Content-Length: 005\r\n\r\nhello", 5),
    Case("length between blanks", _POST + b"Content-Length: \t5 \r\n\r\nhello", 5),
    Case("GET with a body", _GET + b"Content-Length: 5\r\n\r\nhello", 5),
    Case("one chunk", _CHUNKED + b"\r\n5\r\nhello\r\n0\r\n\r\n", 5),
    Case("chunks", _CHUNKED + b"\r\n1\r\nh\r\n4\r\nello\r\n0\r\n\r\n", 5),
    Case("no chunk", _CHUNKED + b"\r\n0\r\n\r\n", 0),
    Case("hexadecimal", _CHUNKED + b"\r\nA\r\nhellohello\r\n0\r\n\r\n", 10),
    Case("size with zeros", _CHUNKED + b"\r\n0005\r\nhello\r\n000\r\n\r\n", 5),
    Case("CHUNKED", _POST + b"Transfer-Encoding: CHUNKED\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 5),
    Case("extension", _CHUNKED + b"\r\n5;a=b\r\nhello\r\n0;c\r\n\r\n", 5),
    Case("trailer", _CHUNKED + b"\r\n5\r\nhello\r\n0\r\nX-Sum: 1\r\n\r\n", 5),
    Case("CRLF before", b"\r\n" + _POST + b"Content-Length: 5\r\n\r\nhello", 5),
    Case(
        "absolute form", b"POST http://a/read HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nh", 1
    ),
    Case("HTTP/1.0", b"POST /read HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello", 5),
    Case("100-continue", _POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\nhello", 5),
    Case("empty field", _POST + b"X-Empty:\r\nContent-Length: 5\r\n\r\nhello", 5),
    Case("two fields", _POST + b"X-A: 1\r\nX-A: 2\r\nContent-Length: 5\r\n\r\nhello", 5),
    Case("bytes above ASCII", _POST + b"X-A: \xe9\xff\r\nContent-Length: 5\r\n\r\nhello", 5),
]


def _refused(name: str, data: bytes) -> Case:
    return Case(name, data, None)


def _length(value: bytes) -> bytes:
    return _POST + b"Content-Length: " + value + b"\r\n\r\nhello" + _SMUGGLED


def _coding(fields: bytes) -> bytes:
    return _POST + fields + b"\r\n\r\n0\r\n\r\n" + _SMUGGLED


def _chunks(data: bytes) -> bytes:
    return _CHUNKED + b"\r\n" + data + _SMUGGLED


REFUSED: Final = [
    _refused("length: sign", _length(b"+5")),
    _refused("length: negative", _length(b"-5")),
    _refused("length: hexadecimal", _length(b"0x5")),
    _refused("length: list", _length(b"5, 5")),
    _refused("length: blank inside", _length(b"5 5")),
    _refused("length: empty", _length(b"")),
    _refused("length: underscore", _length(b"1_0")),
    _refused("length: huge", _length(b"99999999999999999999")),
    _refused("length: twice", _POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello"),
    _refused("length: two", _POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!"),
    _refused("length and coding", _coding(b"Content-Length: 5\r\nTransfer-Encoding: chunked")),
    _refused("coding and length", _coding(b"Transfer-Encoding: chunked\r\nContent-Length: 5")),
    _refused("coding: gzip, chunked", _coding(b"Transfer-Encoding: gzip, chunked")),
    _refused("coding: identity", _coding(b"Transfer-Encoding: identity")),
    _refused("coding: xchunked", _coding(b"Transfer-Encoding: xchunked")),
    _refused("coding: quoted", _coding(b'Transfer-Encoding: "chunked"')),
    _refused("coding: chunked, chunked", _coding(b"Transfer-Encoding: chunked, chunked")),
    _refused("coding: twice", _coding(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked")),
    _refused("coding: vertical tab", _coding(b"Transfer-Encoding: \x0bchunked")),
    _refused("coding: blank before colon", _coding(b"Transfer-Encoding : chunked")),
    _refused("coding: folded", _coding(b"Transfer-Encoding:\r\n chunked")),
    _refused(
        "coding: HTTP/1.0",
        b"POST /read HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + _SMUGGLED,
    ),
    _refused("chunk: blank", _chunks(b"5 \r\nhello\r\n0\r\n\r\n")),
    _refused("chunk: 0x", _chunks(b"0x5\r\nhello\r\n0\r\n\r\n")),
    _refused("chunk: sign", _chunks(b"+5\r\nhello\r\n0\r\n\r\n")),
    _refused("chunk: negative", _chunks(b"-5\r\nhello\r\n0\r\n\r\n")),
    _refused("chunk: LF", _chunks(b"5\nhello\n0\n\n")),
    _refused("chunk: CR", _chunks(b"5\rhello\r0\r\r")),
    _refused("chunk: huge", _chunks(b"ffffffffffffffff\r\nhello\r\n0\r\n\r\n")),
    _refused("chunk: too many digits", _chunks(b"00000000000000005\r\nhello\r\n0\r\n\r\n")),
    _refused("chunk: too long", _chunks(b"4\r\nhello\r\n0\r\n\r\n")),
    _refused("chunk: LF in an extension", _chunks(b"5;a\nb\r\nhello\r\n0\r\n\r\n")),
    _refused("chunk: no size", _chunks(b"\r\nhello\r\n0\r\n\r\n")),
    _refused("trailer: malformed", _chunks(b"0\r\nno trailer\r\n\r\n")),
    _refused("host: none", b"GET /read HTTP/1.1\r\n\r\n" + _SMUGGLED),
    _refused("host: empty", b"GET /read HTTP/1.1\r\nHost:\r\n\r\n" + _SMUGGLED),
    _refused("host: list", b"GET /read HTTP/1.1\r\nHost: a, b\r\n\r\n" + _SMUGGLED),
    _refused("host: twice", b"GET /read HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n" + _SMUGGLED),
    _refused("host: another", b"GET http://b/read HTTP/1.1\r\nHost: a\r\n\r\n" + _SMUGGLED),
    _refused("two keys", _GET + b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n"),
    _refused("expectation", _POST + b"Expect: foo\r\nContent-Length: 5\r\n\r\nhello"),
    _refused("HTTP/1.2", b"GET /read HTTP/1.2\r\nHost: a\r\n\r\n" + _SMUGGLED),
    _refused("HTTP/2.0", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    _refused("LF", b"GET /read HTTP/1.1\nHost: a\n\n" + _SMUGGLED),
    _refused("CR in a value", _GET + b"X: a\rb\r\n\r\n" + _SMUGGLED),
    _refused("NUL in a value", _GET + b"X: a\0b\r\n\r\n" + _SMUGGLED),
    _refused("no name", _GET + b": a\r\n\r\n" + _SMUGGLED),
    _refused("no colon", _GET + b"X\r\n\r\n" + _SMUGGLED),
    _refused("blank in the target", b"GET /read x HTTP/1.1\r\nHost: a\r\n\r\n" + _SMUGGLED),
    _refused("tab in the request line", b"GET\t/read\tHTTP/1.1\r\nHost: a\r\n\r\n" + _SMUGGLED),
    _refused("CONNECT", b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n" + _SMUGGLED),
]
CASES: Final = [*UPGRADES, *ACCEPTED, *REFUSED]
