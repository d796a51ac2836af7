"""Dialects of HTTP APIs: names, paths, the headers of keys and the formats of errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol

from afferent.errors import AfferentError, MediaNotCached, Param, UnsupportedParameter
from afferent.proxy.statuses import message_of, param_of, status_of

_OPENAI_TYPES = {429: "requests"}
"""Types of errors of clients; others are ``invalid_request_error``."""
_ANTHROPIC_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


@dataclass(frozen=True, slots=True)
class KeyHeader:
    """Header of an API's keys: the key follows ``scheme``. Both are in lower case."""

    name: str
    scheme: str = ""

    def key_in(self, headers: Mapping[str, str]) -> str | None:
        """Return the key in these headers; ``None`` if there is none.

        Args:
            headers: With lower-case names.
        """
        value = headers.get(self.name)
        if value is None or not value.lower().startswith(self.scheme):
            return None
        return value[len(self.scheme) :].strip()


BEARER: Final = KeyHeader("authorization", "bearer ")
X_API_KEY: Final = KeyHeader("x-api-key")
KEY_HEADERS: Final = (BEARER, X_API_KEY)
"""Headers of keys of all dialects; every path accepts each of them."""


class ErrorFormat(Protocol):
    """Format of an API's errors."""

    def error_body(self, error: AfferentError, request_id: str) -> Mapping[str, Any]:
        """Return the error in the format of this API. An internal error shows no detail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIDialect:
    """One of OpenAI's APIs.

    Attributes:
        name: For metrics.
        id_prefix: Of its request ids.
        params: The API's names of its parameters.
        names_error_events: Whether an error in a stream of its events is an event named ``error``.
    """

    name: str
    path: str
    id_prefix: str
    params: Mapping[Param, str] = field(default_factory=dict)
    key_header: KeyHeader = BEARER
    names_error_events: bool = True

    def error_body(self, error: AfferentError, request_id: str) -> dict[str, Any]:
        """Return the error in the format of this API. An internal error shows no detail."""
        status = status_of(error)
        body: dict[str, Any] = {
            "message": message_of(error),
            "type": _OPENAI_TYPES.get(status, "invalid_request_error")
            if status < 500
            else "server_error",
            "param": param_of(error, self.params),
            "code": error.code,
        }
        if isinstance(error, MediaNotCached):
            body["uuids"] = error.uuids
        return {"error": body}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnthropicDialect:
    """One of Anthropic's APIs; the attributes are those of `OpenAIDialect`."""

    name: str
    path: str
    id_prefix: str = "msg_"
    key_header: KeyHeader = X_API_KEY
    names_error_events: bool = True

    def error_body(self, error: AfferentError, request_id: str) -> dict[str, Any]:
        """Return the error in the format of this API. An internal error shows no detail."""
        status, message = status_of(error), message_of(error)
        param = param_of(error, {Param.MESSAGES: "messages"})
        is_missing = param is not None and not message.startswith(param)
        kind = _ANTHROPIC_ERRORS.get(
            status, "invalid_request_error" if status < 500 else "api_error"
        )
        described: dict[str, Any] = {
            "type": kind,
            "message": f"{param}: {message}" if is_missing else message,
        }
        if isinstance(error, UnsupportedParameter) and param == "thread":
            # Anthropic's client then sends the whole conversation, without the parameter.
            described["details"] = {"error_code": "thread_unsupported_request"}
        return {"type": "error", "error": described, "request_id": request_id}


Dialect = OpenAIDialect | AnthropicDialect

CHAT: Final = OpenAIDialect(
    name="openai_chat",
    path="/v1/chat/completions",
    id_prefix="chatcmpl-",
    params={Param.MESSAGES: "messages"},
    names_error_events=False,
)
RESPONSES: Final = OpenAIDialect(
    name="openai_responses",
    path="/v1/responses",
    id_prefix="resp_",
    params={Param.MESSAGES: "input", Param.PREVIOUS_ANSWER: "previous_response_id"},
)
INPUT_TOKENS: Final = replace(
    RESPONSES, name="openai_input_tokens", path="/v1/responses/input_tokens"
)
CONVERSATIONS: Final = OpenAIDialect(
    name="openai_conversations",
    path="/v1/conversations",
    id_prefix="request-",
    params={Param.MESSAGES: "items"},
    names_error_events=False,
)
MESSAGES: Final = AnthropicDialect(name="anthropic_messages", path="/v1/messages")
COUNT_TOKENS: Final = AnthropicDialect(
    name="anthropic_count_tokens", path="/v1/messages/count_tokens"
)
FILES: Final = OpenAIDialect(
    name="openai_files", path="/v1/files", id_prefix="request-", names_error_events=False
)
ANTHROPIC_FILES: Final = AnthropicDialect(
    name="anthropic_files", path="/v1/files", id_prefix="req_"
)
NONE: Final = OpenAIDialect(name="", path="", id_prefix="request-", names_error_events=False)
"""Format of errors at every other path."""

DIALECTS: Final[Mapping[str, Dialect]] = {
    each.path: each for each in (CHAT, RESPONSES, INPUT_TOKENS, MESSAGES, COUNT_TOKENS)
}
"""By path."""
