"""Answer to a client: an upstream's, or an error."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from afferent.engines.upstream import Headers
from afferent.errors import AfferentError
from afferent.proxy.answer_headers import with_report
from afferent.proxy.dialects import Dialect
from afferent.proxy.http_server.exchange import hang_up
from afferent.proxy.load import LoadReport
from afferent.proxy.request_scope import RequestScope
from afferent.proxy.responses import refusal

_OF_CORS = b"access-control-"


class ClientAnswer:
    """Answer to one request.

    Attributes:
        load: Load report in its headers.
        has_begun: Whether a part of it was sent.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        own: RequestScope,
        api: Dialect,
        *,
        has_own_cors: bool,
    ) -> None:
        """Create it.

        Args:
            has_own_cors: Whether this server's headers of CORS replace those of the upstream.
        """
        self._scope, self._receive, self._send = scope, receive, send
        self._own, self._api, self._has_own_cors = own, api, has_own_cors
        self.load = LoadReport()
        self.has_begun = self._is_stream = False

    async def begin(self, status: int, headers: Headers, *, is_stream: bool) -> None:
        """Send the status and the headers of the upstream's answer, with this server's own."""
        headers = [(name.lower(), value) for name, value in headers]
        if self._has_own_cors:
            headers = [each for each in headers if not each[0].startswith(_OF_CORS)]
        headers = with_report(self.load.added_to(headers), self._own.trace)
        self.has_begun, self._is_stream = True, is_stream
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, chunk: bytes, *, is_last: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": not is_last})

    async def fail(self, failure: AfferentError) -> None:
        """Send an error in the API's format, or as the end of a stream that has begun."""
        if self.has_begun and not self._is_stream:
            hang_up(self._scope)  # so that a client does not take it for complete
            return
        answer = refusal(failure, self._own.id, self._api)
        if not self.has_begun:
            headers = self.load.added_to(answer.raw_headers)
            answer.raw_headers = with_report(headers, self._own.trace)
            await answer(self._scope, self._receive, self._send)
            return
        head = b"event: error\n" if self._api.names_error_events else b""
        frame = b"\n\n" + head + b"data: " + bytes(answer.body) + b"\n\n"
        await self.send(frame, is_last=True)
