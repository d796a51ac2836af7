"""Start page of a server for browsers, and hints for wrong paths."""

from __future__ import annotations

from collections.abc import Collection
from html import escape
from string import Template
from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from afferent import __version__
from afferent.proxy.responses import json_answer

_OLLAMA: Final = frozenset({"/api/chat", "/api/generate", "/api/tags", "/api/show", "/api/embed"})
_OTHERS: Final = (
    *("/v1/embeddings", "/v1/audio/", "/v1/images/", "/v1/batches"),
    *("/v1/moderations", "/v1/assistants", "/v1/threads", "/v1/realtime"),
)
FILES: Final = ("/v1/files", "/v1/uploads")
"""Paths of the APIs for stored files."""
NOT_STORED: Final = (
    "this server stores no files: set --files-store to a folder, or to the URL of an object store"
)
_PAGE: Final = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Afferent</title>
<style>
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 0 1rem;
  color: #222; background: #fff }
code { font: .9em ui-monospace, monospace; background: #8882; padding: .1em .3em }
td { padding: .2rem 1.5rem .2rem 0; vertical-align: top }
a { color: #06c }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 } a { color: #7bf } }
</style>
<h1>Afferent $version</h1>
<p>This server answers requests with images, audio and video. It prepares the media once, and keeps
the results in shared memory, so that a repeated image is not processed again.</p>
<p>The base URL for OpenAI's clients is this address followed by <code>/v1</code>; for Anthropic's
clients it is this address.</p>
<table>
<tr><td><a href="/openapi.json">/openapi.json</a><td>the API's description
<tr><td><a href="/v1/models">/v1/models</a><td>the model and its limits
<tr><td><a href="/ready">/ready</a><td>whether a request would be served now
<tr><td><a href="/metrics">/metrics</a><td>metrics, for Prometheus
<tr><td>$page<td>requests, memory and hits, live
</table>
</html>
""")
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"


def welcome(request: Request, *, page_port: int) -> Response:
    """Return a page about this server for a browser, and JSON for another client.

    Args:
        page_port: Port of the live page; not positive: it is unknown, or there is none.
    """
    if "text/html" not in request.headers.get("accept", ""):
        return json_answer({"name": "afferent", "version": __version__})
    host = request.headers.get("host", "localhost")
    page = "the live page: start the server with <code>--ui 8080</code>"
    if page_port > 0:
        address = f"http://{host.rpartition(':')[0] or host}:{page_port}/"
        page = f'<a href="{escape(address, quote=True)}">the live page</a>'
    text = _PAGE.substitute(version=__version__, page=page)
    return HTMLResponse(text, headers={"content-security-policy": _POLICY})


def is_of_files(path: str) -> bool:
    """Whether a path is one of the APIs for stored files."""
    return path in FILES or path.startswith(tuple(f"{each}/" for each in FILES))


def hint_for(path: str, known: Collection[str]) -> str:
    """Return the next step for a client that has requested a path that does not exist.

    Args:
        known: Paths that exist.
    """
    if path.startswith("/v1/v1/"):
        return f"the base URL ends with /v1 twice: the path is {path[3:200]}"
    if f"/v1{path}" in known:
        return f"the base URL lacks /v1: the path is /v1{path[:200]}"
    if path in _OLLAMA:
        return "this is a path of Ollama's API, which is not served; use /v1/chat/completions"
    if is_of_files(path) and FILES[0] not in known:
        return NOT_STORED
    if path.startswith(_OTHERS):
        return (
            f"{path[:200]} is not served by the built-in engine; GET /openapi.json lists what is, "
            "and with --engine vllm all endpoints of vLLM are served"
        )
    return "there is no such endpoint; GET /openapi.json lists them"
