"""Endpoint in the scope of its request: from the request to its answer, in its API's format."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from afferent.proxy.dialects import ANTHROPIC_FILES, FILES, AnthropicDialect, OpenAIDialect
from afferent.proxy.http_server.exchange import hang_up
from afferent.proxy.request_scope import RequestScope, RequestScopes
from afferent.proxy.responses import json_answer, refusal

_VERSION: Final = "anthropic-version"


def dialect_of(request: Request) -> OpenAIDialect | AnthropicDialect:
    """Return the API that a client uses at the paths of files."""
    return ANTHROPIC_FILES if _VERSION in request.headers else FILES


@dataclass(frozen=True, slots=True)
class Call:
    """Request to one endpoint, of a client that is admitted."""

    request: Request
    own: RequestScope
    dialect: OpenAIDialect | AnthropicDialect

    @property
    def tenant(self) -> str:
        return self.own.share.tenant

    @property
    def is_anthropic(self) -> bool:
        return isinstance(self.dialect, AnthropicDialect)

    def id(self, name: str) -> str:
        """Return an id in the path."""
        return str(self.request.path_params[name])

    def answer(self, value: object) -> Response:
        return json_answer(value, self.own.id)


class ScopedEndpoint:
    """ASGI application for a path and method; ``__doc__`` is its description for OpenAPI."""

    def __init__(
        self,
        scopes: RequestScopes,
        work: Callable[[Call], Awaitable[Response]],
        *,
        is_long: bool = False,
        body: Mapping[str, Any] | type[Struct] | None = None,
        answer_type: str = "application/json",
        dialect: OpenAIDialect | None = None,
    ) -> None:
        """Create it.

        Args:
            is_long: Whether the duration depends on the length of a file: the time limit of
                requests does not apply.
            body: Content of the request in the OpenAPI document: a schema by media type, or the
                type of a JSON body.
            answer_type: Media type of the answer.
            dialect: API of the endpoint; ``None``: that of files which the client uses.
        """
        self._scopes, self._work, self._is_long = scopes, work, is_long
        self._dialect = dialect
        self.body, self.answer_type = body, answer_type
        self.__doc__ = work.__doc__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        dialect = self._dialect or dialect_of(request)
        with self._scopes.open(
            *(f"{request.method} {scope['path']}", scope["headers"]),
            id_prefix=dialect.id_prefix,
            api=dialect.name,
        ) as own:
            own.trace.media = "none"
            has_begun = False

            async def noting(message: Message) -> None:
                nonlocal has_begun
                has_begun = True
                await send(message)

            try:
                async with asyncio.timeout_at(None if self._is_long else own.deadline):
                    await own.admit(request.headers, scope)
                    answer = await self._work(Call(request, own, dialect))
                    await answer(scope, receive, noting)
            except ClientDisconnect:
                own.leave()
            except Exception as error:
                failure = own.fail(error)
                if has_begun:
                    hang_up(scope)  # so that a client does not take it for complete
                else:
                    await refusal(failure, own.id, dialect)(scope, receive, send)
