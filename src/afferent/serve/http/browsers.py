"""Guard against requests that pages of other origins send through a browser."""

from __future__ import annotations

from collections.abc import Collection, Container

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from afferent.errors import InvalidRequest
from afferent.http_server.origins import is_from_own_page, is_reached_by
from afferent.serve.http.responses import new_id, refusal


class BrowserGuard:
    """ASGI application in front of another one that needs no key."""

    def __init__(
        self, app: ASGIApp, *, names: Container[str] | None, origins: Collection[str]
    ) -> None:
        """Create it.

        Args:
            names: Host names of the server, in lower case, in addition to addresses; ``None``
                allows any name.
            origins: Origins whose pages may send requests; ``*`` allows all.
        """
        self._app, self._names, self._origins = app, names, origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._refusal(Headers(scope=scope)) if "headers" in scope else None
        if found is None:
            await self._app(scope, receive, send)
            return
        status, why = found
        answer = refusal(InvalidRequest(why), new_id("request-"), status=status)
        await answer(scope, receive, send)  # also refuses the handshake of a WebSocket

    def _refusal(self, headers: Headers) -> tuple[int, str] | None:
        host = headers.get("host")
        if self._names is not None and host is not None and not is_reached_by(host, self._names):
            return 421, (
                f"the server is not reached by the name {host[:100]!r}: "
                "add the name to --allowed-hosts, or set an API key"
            )
        origin = headers.get("origin")
        if origin is not None and ("*" in self._origins or origin in self._origins):
            return None
        if not is_from_own_page(headers):
            return 403, (
                "a page of another origin may not use a server without keys: "
                "add its origin to --cors-origin, or set an API key"
            )
        return None
