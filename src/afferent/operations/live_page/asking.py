"""Playground: pass a question from the page to a frontend, and its answer back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Final

import httpcore
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from afferent.proxy.responses import ClosingStream

_PATH: Final = "/v1/chat/completions"
_MAX_ASKED: Final = 4
_CONNECT_TIMEOUT_S: Final = 5.0
_BODY_TIMEOUT_S: Final = 30.0
"""For all of a question: its connection is one of few."""
_PASSED_BACK: Final = (b"content-type", b"x-request-id", b"retry-after")


class Asking:
    """Proxy for chat completions; the page writes their bodies, which pass unchanged.

    Invariants: at most `_MAX_ASKED` questions run at a time.
    """

    def __init__(self, api_url: str, *, api_key: str, timeout_s: float) -> None:
        """Prepare the requests to the frontends.

        Args:
            api_key: Sent with each question, and never to the page. Empty: no key is sent.
            timeout_s: Without a byte from the frontend.
        """
        self._url = api_url + _PATH
        self._headers = [(b"content-type", b"application/json")]
        if api_key:
            self._headers.append((b"authorization", b"Bearer " + api_key.encode()))
        self._timeouts = dict.fromkeys(("read", "write", "pool"), timeout_s)
        self._timeouts["connect"] = _CONNECT_TIMEOUT_S
        self._num_asked = 0

    async def answer(self, request: Request) -> Response:
        """Return the frontend's answer unchanged, or an error of the proxy."""
        if self._num_asked >= _MAX_ASKED:
            return _refusal(429, "the page has as many questions as it may; try again")
        self._num_asked += 1
        stack = AsyncExitStack()
        stack.callback(self._done)
        try:
            return await self._ask(request, stack)
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException):
            await stack.aclose()
            return _refusal(502, "no frontend answers; try again")
        except _TooSlow:
            await stack.aclose()
            return _refusal(408, "the question did not arrive in time")
        except ClientDisconnect:
            await stack.aclose()
            return Response(status_code=499)
        except BaseException:
            await stack.aclose()
            raise

    async def _ask(self, request: Request, stack: AsyncExitStack) -> Response:
        headers = list(self._headers)
        if length := request.headers.get("content-length"):
            headers.append((b"content-length", length.encode("latin-1")))
        pool = await stack.enter_async_context(httpcore.AsyncConnectionPool())
        answer = await stack.enter_async_context(
            pool.stream(
                "POST",
                self._url,
                headers=headers,
                content=_body(request),
                extensions={"timeout": self._timeouts},
            )
        )
        back = {
            name.decode(): value.decode("latin-1")
            for name, value in answer.headers
            if name.lower() in _PASSED_BACK
        }
        return ClosingStream(answer.aiter_stream(), stack, status_code=answer.status, headers=back)

    def _done(self) -> None:
        self._num_asked -= 1


class _TooSlow(Exception):
    """A question that did not arrive in time."""


async def _body(request: Request) -> AsyncIterator[bytes]:
    """
    Raises:
        _TooSlow: The body has not ended in time.
    """
    loop, chunks = asyncio.get_running_loop(), request.stream()
    deadline = loop.time() + _BODY_TIMEOUT_S
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise _TooSlow from None
        if chunk is None:
            return
        if chunk:
            yield chunk


def _refusal(status: int, why: str) -> Response:
    return JSONResponse({"error": {"message": why}}, status_code=status)
