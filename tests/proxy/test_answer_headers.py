"""Headers that report what was done for a request."""

from __future__ import annotations

import pytest

from afferent.proxy.answer_headers import client_id_in, with_report
from afferent.telemetry.trace import Trace
from afferent.types import Span

MS = 1_000_000


def trace(client_id: str = "") -> Trace:
    return Trace("chatcmpl-1", "POST /", client_request_id=client_id)


def test_answer_without_media_has_an_id_alone() -> None:
    assert with_report([], trace()) == [(b"x-request-id", b"chatcmpl-1")]
    own = [(b"X-Request-Id", b"of the upstream")]
    assert with_report(own, trace()) == own


def test_client_id_replaces_all_others() -> None:
    headers = dict(with_report([(b"X-Request-Id", b"other"), (b"a", b"b")], trace("mine")))
    assert headers == {
        b"a": b"b",
        b"x-request-id": b"mine",
        b"x-afferent-request-id": b"chatcmpl-1",
    }


def test_items_and_stages_are_reported() -> None:
    one = trace()
    one.outcomes.update({"hit": 2, "made": 1})
    spans = [("read_body", 0, 3), ("decode", 3, 10), ("decode", 4, 6), ("bad name\r\n", 0, 9)]
    one.spans += [Span("p", 1, stage, start * MS, end * MS, 0, "") for stage, start, end in spans]
    headers = dict(with_report([], one))
    assert headers[b"x-afferent-items"] == b"hit=2, made=1"
    assert headers[b"server-timing"] == b"read_body;dur=3.0, decode;dur=9.0"


def test_limit_of_a_tenant_replaces_that_of_an_upstream() -> None:
    tokens = (b"x-ratelimit-remaining-tokens", b"7")
    upstream = [(b"x-ratelimit-remaining-requests", b"99"), tokens]
    upstream += [(b"X-RateLimit-Reset-Requests", b"6s"), (b"x-ratelimit-limit-requests", b"100")]
    one = trace()
    assert with_report(upstream, one)[:4] == upstream, "the tenant has no limit"
    one.max_requests = 2
    assert with_report(upstream, one) == [
        tokens,
        (b"x-request-id", b"chatcmpl-1"),
        (b"x-ratelimit-limit-requests", b"2"),
        (b"x-ratelimit-remaining-requests", b"0"),
    ]


def test_stages_are_limited() -> None:
    one = trace()
    one.spans += [Span("p", 1, f"s{number}", 0, MS, 0, "") for number in range(100)]
    assert dict(with_report([], one))[b"server-timing"].count(b"dur=") == 24


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"abc-123", "abc-123"),
        (b"x" * 128, "x" * 128),
        (b"x" * 129, ""),
        (b"", ""),
        (b"two words", ""),
        (b"caf\xe9", ""),
        (b"line\nbreak", ""),
    ],
)
def test_malformed_client_id_is_ignored(sent: bytes, expected: str) -> None:
    assert client_id_in([(b"a", b"b"), (b"x-request-id", sent)]) == expected
