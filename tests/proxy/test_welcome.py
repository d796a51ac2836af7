"""The page at a server's address, and hints for paths that do not exist."""

from __future__ import annotations

import pytest
from starlette.requests import Request

from afferent.proxy.welcome import hint_for, welcome

KNOWN = {"/v1/chat/completions", "/health"}


def asked(**headers: str) -> Request:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "GET", "path": "/", "headers": raw})


def page(*, page_port: int, host: str = "localhost:8000") -> str:
    answer = welcome(asked(accept="text/html,*/*", host=host), page_port=page_port)
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    return bytes(answer.body).decode()


def test_browser_gets_a_page_with_a_link_to_the_live_page() -> None:
    assert '<a href="http://localhost:8080/">' in page(page_port=8080)
    assert '<a href="http://[::1]:8080/">' in page(page_port=8080, host="[::1]:8000")
    assert "--ui 8080" in page(page_port=-1)


def test_host_of_a_client_is_escaped() -> None:
    assert "<script>" not in page(page_port=80, host='"><script>alert(1)</script>')


def test_other_client_gets_json() -> None:
    answer = welcome(asked(accept="*/*"), page_port=-1)
    assert b'"name":"afferent"' in answer.body


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v1/v1/chat/completions", "the path is /v1/chat/completions"),
        ("/chat/completions", "lacks /v1: the path is /v1/chat/completions"),
        ("/api/generate", "Ollama"),
        ("/v1/audio/transcriptions", "not served by the built-in engine"),
        ("/v1/batches", "not served by the built-in engine"),
        ("/v1/files", "--files-store"),
        ("/v1/uploads/upload_1/parts", "--files-store"),
        ("/v1/filesystem", "GET /openapi.json"),
        ("/nowhere", "GET /openapi.json"),
    ],
)
def test_hint_names_the_next_step(path: str, expected: str) -> None:
    assert expected in hint_for(path, KNOWN)


def test_hint_for_a_long_path_is_short() -> None:
    assert len(hint_for("/v1/v1/" + "x" * 10_000, KNOWN)) < 400
