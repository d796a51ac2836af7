"""The mutants of the HTTP server: see `tools.mutant_list`."""

from __future__ import annotations

from typing import Final

from tools.mutant import Mutant

_CONNECTION = "proxy/http_server/connection.py"
_CONNECTION_TESTS = (
    "tests/http_server/test_connection.py::test_thousands_of_requests_ahead_of_their_answers",
)
_FRAMING, _FRAMING_TESTS = "proxy/http_server/framing.py", ("tests/http_server/test_framing.py",)
_HEAD = "proxy/http_server/head.py"

HTTP_MUTANTS: Final = (
    Mutant(
        what="any number of requests may be sent ahead of their answers",
        file=_CONNECTION,
        old="        if self._rest and self._phase is _Phase.ANSWER:\n"
        "            self._flow.pause_reading()\n",
        new="",
        tests=_CONNECTION_TESTS,
    ),
    Mutant(
        what="the last of two hosts counts",
        file=_HEAD,
        old='*(b"expect", b"host", b"origin"',
        new='*(b"expect", b"origin"',
        tests=_FRAMING_TESTS,
    ),
    Mutant(
        what="any coding that ends in chunks is one",
        file=_HEAD,
        old='coding.lower() != b"chunked"',
        new='not coding.lower().endswith(b"chunked")',
        tests=_FRAMING_TESTS,
    ),
    Mutant(
        what="a chunked body of HTTP/1.0 is read as chunks",
        file=_HEAD,
        old='version == "1.0" or length is not None or',
        new="length is not None or",
        tests=_FRAMING_TESTS,
    ),
    Mutant(
        what="the length counts where the body is chunked, too",
        file=_HEAD,
        old='version == "1.0" or length is not None or',
        new='version == "1.0" or',
        tests=_FRAMING_TESTS,
    ),
    Mutant(
        what="the target may name another host",
        file=_HEAD,
        old="if host is None or absolute[1].lower() != host.lower():",
        new="if host is None:",
        tests=_FRAMING_TESTS,
    ),
    Mutant(
        what="an upgrade ends a request with a body",
        file=_HEAD,
        old="            and length == 0\n",
        new="",
        tests=("tests/http_server/test_framing.py", "tests/http_server/test_server.py"),
    ),
    Mutant(
        what="a chunk may be longer than its size",
        file=_FRAMING,
        old='data[pos : pos + 2] not in (b"", b"\\r")',
        new="False",
        tests=_FRAMING_TESTS,
    ),
    Mutant(
        what="a body with a length takes all that is there",
        file=_FRAMING,
        old="data[pos : pos + self._left_nbytes]  # the same object",
        new="data[pos:]  # the same object",
        tests=_FRAMING_TESTS,
    ),
)
