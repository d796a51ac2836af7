"""End of a WebSocket: its client has left, or it has failed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from afferent.errors import AfferentError
from afferent.proxy.dialects import ErrorFormat
from afferent.proxy.http_server.exchange import ClientGone
from afferent.proxy.request_scope import RequestScope
from afferent.proxy.responses import refusal


@contextlib.asynccontextmanager
async def ending(
    client: WebSocket,
    own: RequestScope,
    api: ErrorFormat,
    close: Callable[[AfferentError], Awaitable[None]],
) -> AsyncIterator[None]:
    """Note how the WebSocket ends in this context; its client is told of a failure.

    Args:
        api: Format of the refusal of a WebSocket that is not accepted yet.
        close: Closes one that is accepted.
    """
    try:
        yield
    except (WebSocketDisconnect, ClientGone):
        own.leave()
    except Exception as error:
        failure = own.fail(error)
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # it may be gone
            if client.application_state is WebSocketState.CONNECTING:
                await client.send_denial_response(refusal(failure, own.id, api))
            else:
                await close(failure)
