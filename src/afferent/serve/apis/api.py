"""What an API is to the server: a translation of a request into our words, and of its answer back.

Each API is a folder, which offers one `Api`, and a line in `afferent.serve.apis.registry`. None of
them does I/O on a connection: bodies are read, requests run and answers sent in one place for all
(`afferent.serve.http`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from msgspec import Struct

from afferent.errors import AfferentError
from afferent.ingest.cutter import MediaKeys
from afferent.serve.flow.call import Call, ModelNames, ReceivedBody
from afferent.serve.flow.conversations import History
from afferent.serve.flow.request import Rendered


@dataclass(frozen=True, slots=True)
class KeyHeader:
    """Where an API's clients put their key: after ``scheme`` in a header. Both in lower case."""

    name: str
    scheme: str = ""

    def key_in(self, headers: Mapping[str, str]) -> str | None:
        """``None``: there is none, or something else.

        Args:
            headers: With lower-case names.
        """
        value = headers.get(self.name)
        if value is None or not value.lower().startswith(self.scheme):
            return None
        return value[len(self.scheme) :].strip()


class Api(Protocol):
    """One way of asking for an answer."""

    @property
    def name(self) -> str:
        """For metrics: a word such as ``openai_chat``."""

    @property
    def path(self) -> str:
        """Where it is asked, such as ``/v1/chat/completions``."""

    @property
    def id_prefix(self) -> str:
        """What the ids of its requests begin with, such as ``chatcmpl-``."""

    @property
    def request_type(self) -> type[Struct]:
        """The schema of its bodies, for the OpenAPI document."""

    @property
    def example(self) -> Mapping[str, Any]:
        """A request, but for its model."""

    @property
    def media_keys(self) -> MediaKeys:
        """Where media may stand in its bodies."""

    @property
    def key_header(self) -> KeyHeader:
        """Where its clients put their key; at other paths it is looked for there, too."""

    @property
    def besides(self) -> Sequence[TokenCount | Lookup]:
        """What else it is asked."""

    def parse(
        self,
        body: ReceivedBody,
        *,
        request_id: str,
        model: ModelNames,
        refuses_unknown: bool = False,
    ) -> Call:
        """Understand a request for the model that is served under the name or names ``model``.

        Args:
            refuses_unknown: A parameter that nobody knows is not ignored.

        Raises:
            InvalidRequest: The body is not JSON, or not of the API's schema; it says where.
            ModelNotFound: Another model is asked for.
            UnsupportedParameter: A parameter that is known, and not served.
        """

    def error_body(self, error: AfferentError, request_id: str) -> Mapping[str, Any]:
        """The error as this API writes it. A defect of ours shows no detail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """An endpoint that says which tokens a request's prompt has, or how many; nothing is generated.

    ``api`` reads the request, at a path of its own; ``answer`` says it.
    """

    api: Api
    answer: Callable[[Rendered], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Asked:
    """By whom, and for what: the tenant's name, and the id in the path."""

    request_id: str
    tenant: str
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """An endpoint for an answer that is kept; its ``path`` has the ``{id}``.

    ``answer`` gives what is sent as JSON; the first line of its docstring describes the endpoint.
    """

    method: Literal["GET", "DELETE"]
    path: str
    answer: Callable[[History, Asked], Awaitable[object]]
