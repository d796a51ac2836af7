"""Interface of an API: the translation of its requests to internal ones, and of the answers back.

Each API is a folder with one `Api`, and a line in `afferent.builtin.apis.registry`. None of them
does I/O on a connection: `afferent.builtin.http` reads bodies, runs requests and sends answers for
all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec import Struct

from afferent.builtin.pipeline.call import Call, ModelNames
from afferent.builtin.pipeline.conversations import History
from afferent.builtin.pipeline.request import Rendered
from afferent.errors import AfferentError
from afferent.media.body.cutter import MediaKeys
from afferent.media.body.received import ReceivedBody
from afferent.proxy.dialects import KeyHeader


class Api(Protocol):
    """API for requests that generate an answer."""

    @property
    def name(self) -> str:
        """Name for metrics: a word such as ``openai_chat``."""

    @property
    def path(self) -> str:
        """Path of its requests, such as ``/v1/chat/completions``."""

    @property
    def id_prefix(self) -> str:
        """Prefix of its request ids, such as ``chatcmpl-``."""

    @property
    def request_type(self) -> type[Struct]:
        """Schema of its bodies, for the OpenAPI document."""

    @property
    def example(self) -> Mapping[str, Any]:
        """Example of a request, without its model."""

    @property
    def media_keys(self) -> MediaKeys:
        """JSON keys of media in its bodies."""

    @property
    def key_header(self) -> KeyHeader:
        """Header of its clients' keys; other paths accept it, too."""

    @property
    def besides(self) -> Sequence[TokenCount | Lookup]:
        """Extra endpoints of the API."""

    def parse(
        self,
        body: ReceivedBody,
        *,
        request_id: str,
        model: ModelNames,
        refuses_unknown: bool = False,
    ) -> Call:
        """Parse a request for the model with the name or names ``model``.

        Args:
            refuses_unknown: Refuse unknown parameters instead of ignoring them.

        Raises:
            InvalidRequest: The body is not JSON, or not of the API's schema; the message says
                where.
            ModelNotFound: The request names another model.
            UnsupportedParameter: A parameter is known, and not supported.
        """

    def error_body(self, error: AfferentError, request_id: str) -> Mapping[str, Any]:
        """Return the error in the format of this API. An internal error shows no detail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """Endpoint that returns a prompt's tokens, or their number; no answer is generated.

    ``api`` parses the request, at a path of its own; ``answer`` makes the response.
    """

    api: Api
    answer: Callable[[Rendered], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Asked:
    """Caller and subject of a lookup: the tenant's name, and the id in the path."""

    request_id: str
    tenant: str
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Endpoint for a stored answer; its ``path`` contains ``{id}``.

    ``answer`` returns the JSON response; the first line of its docstring describes the endpoint.
    """

    method: Literal["GET", "DELETE"]
    path: str
    answer: Callable[[History, Asked], Awaitable[object]]
