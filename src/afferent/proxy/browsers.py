"""Requests that pages of other origins send through a browser: which are refused, and CORS."""

from __future__ import annotations

from collections.abc import Collection, Container

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from afferent.errors import InvalidRequest
from afferent.proxy.answer_headers import REPORTED
from afferent.proxy.http_server.origins import is_from_own_page, is_reached_by
from afferent.proxy.responses import IGNORED, new_id, refusal
from afferent.proxy.tenancy import plain_path
from afferent.proxy.welcome import is_of_files

_EXPOSED = ("x-request-id", "request-id", "retry-after", IGNORED, *REPORTED)


class BrowserGuard:
    """ASGI application in front of another one that needs no key."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        names: Container[str],
        origins: Collection[str],
        is_loopback: bool,
    ) -> None:
        """Create it.

        Args:
            names: Host names of the server, in lower case, in addition to addresses.
            origins: Origins whose pages may send requests; ``*`` allows all.
            is_loopback: Whether only its own machine reaches the server. Elsewhere, programs may
                reach it by any name, and pages by these; only these names lead to stored files.
        """
        self._app, self._names, self._origins = app, names, origins
        self._is_loopback = is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = None
        if "headers" in scope:
            found = self._refusal(Headers(scope=scope), is_of_files(plain_path(scope["path"])))
        if found is None:
            await self._app(scope, receive, send)
            return
        status, why = found
        answer = refusal(InvalidRequest(why), new_id("request-"), status=status)
        await answer(scope, receive, send)  # also refuses the handshake of a WebSocket

    def _refusal(self, headers: Headers, is_for_files: bool) -> tuple[int, str] | None:
        origin = headers.get("origin")
        is_allowed = origin is not None and ("*" in self._origins or origin in self._origins)
        # A page whose name leads here by now (DNS rebinding) has the origin that it asks. Its `GET`
        # has no `Origin`, like those of programs.
        is_page = origin is not None and not is_allowed
        host = headers.get("host")
        if (is_page or self._is_loopback or is_for_files) and not self._is_reached_by(host):
            return 421, (
                f"the server is not reached by the name {(host or '')[:100]!r}: "
                "add the name to --allowed-hosts, or set an API key"
            )
        if not is_allowed and not is_from_own_page(headers):
            return 403, (
                "a page of another origin may not use a server without keys: "
                "add its origin to --cors-origin, or set an API key"
            )
        return None

    def _is_reached_by(self, host: str | None) -> bool:
        return host is None or is_reached_by(host, self._names)


def with_cors(app: ASGIApp, origins: Collection[str]) -> ASGIApp:
    """Return an application that lets pages of these origins read its answers (CORS).

    It answers preflights itself: they have no key.

    Args:
        origins: Origins; ``*`` allows all. If there are none, the application is unchanged.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=_EXPOSED,
        max_age=600,
    )
