"""Access control of the page, and its security headers.

A browser runs pages of any origin: a foreign page that the operator has open can send requests
here. Therefore:

- A host name that resolves to this machine is not sufficient (DNS rebinding).
- Requests from pages of another origin are refused (CSRF).
- The key is in a header that no browser sends on its own.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Container
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from afferent.proxy.http_server.origins import is_from_own_page, is_reached_by

_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


class Guard:
    """ASGI middleware that refuses foreign requests."""

    def __init__(
        self, app: ASGIApp, *, key: str, names: Container[str], open_paths: Container[str]
    ) -> None:
        """Wrap ``app``.

        Args:
            key: Required key; empty: none.
            names: Host names of the page; addresses are always accepted.
            open_paths: Paths without secrets, served without the key.
        """
        self._app, self._names, self._open_paths = app, names, open_paths
        self._digest = _digest(key) if key else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        refusal = self._refusal(scope["method"], scope["path"], Headers(scope=scope))
        app: ASGIApp = self._app
        if refusal is not None:
            status, why = refusal
            app = JSONResponse({"error": {"message": why}}, status_code=status)
        await app(scope, receive, send_guarded)

    def _refusal(self, method: str, path: str, headers: Headers) -> tuple[int, str] | None:
        if not is_reached_by(headers.get("host", ""), self._names):
            return 421, "the page is not reached by that name: take the address, or localhost"
        if path in self._open_paths and method in ("GET", "HEAD"):
            return None
        if headers.get("sec-fetch-site") == "none" or not is_from_own_page(headers):
            return 403, "only the page itself may ask"
        if self._digest and not self._has_key(headers):
            return 401, "the page's key is needed"
        is_json = headers.get("content-type", "").partition(";")[0].strip() == "application/json"
        if method == "POST" and not is_json:
            return 415, "the body must be application/json"
        return None

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, sent = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(_digest(sent), self._digest)


def _digest(key: str) -> bytes:
    """Return a digest: equal lengths, so that a comparison does not reveal the key's length."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
