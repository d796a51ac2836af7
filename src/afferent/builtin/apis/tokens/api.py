"""``/tokenize`` and ``/detokenize``, as in vLLM: tokens of a text or conversation, and back.

No answer is generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

from afferent.builtin.apis import openai, parameters, schema
from afferent.builtin.apis.asking import with_template
from afferent.builtin.apis.chat.input import read_messages
from afferent.builtin.apis.chat.schema import ChatMessage
from afferent.builtin.pipeline.call import Answer, Call, ModelNames
from afferent.builtin.pipeline.request import GenerateRequest, Output, Rendered
from afferent.errors import AfferentError, InvalidRequest, Param
from afferent.media.body.received import ReceivedBody
from afferent.proxy.dialects import OpenAIDialect
from afferent.types import TokenId

_DIALECT = OpenAIDialect(name="", path="", id_prefix="tokens-", params={Param.MESSAGES: "messages"})
"""Common part of both APIs, which have names and paths of their own."""
_Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=schema.MAX_PARTS)]


class TokenizeRequest(schema.ConversationRequest, kw_only=True):
    """Request with either ``prompt`` or ``messages``."""

    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(schema.AnyRequest, kw_only=True):
    tokens: Annotated[list[TokenId], Meta(min_length=1, max_length=2**20)]


class _Tokens:
    """Common part of both APIs."""

    id_prefix = _DIALECT.id_prefix
    media_keys = openai.MEDIA_KEYS
    key_header = _DIALECT.key_header
    besides = ()

    def error_body(self, error: AfferentError, request_id: str) -> Mapping[str, Any]:
        return _DIALECT.error_body(error, request_id)


class Tokenize(_Tokens):
    """Tokenization; see `afferent.builtin.apis.api.Api`."""

    name = parameters.TOKENIZE
    path = "/tokenize"
    request_type = TokenizeRequest
    example: Mapping[str, Any] = {"prompt": "a red circle"}

    def __init__(self) -> None:
        self._reader = schema.Reader(TokenizeRequest, self.name)

    def parse(
        self,
        body: ReceivedBody,
        *,
        request_id: str,
        model: ModelNames,
        refuses_unknown: bool = False,
    ) -> Call:
        asked, ignored = self._reader.read(body.json, served=model, refuses_unknown=refuses_unknown)
        if (asked.prompt is None) is (asked.messages is None):
            raise InvalidRequest("one of prompt and messages is needed", param="prompt")
        generate = GenerateRequest(
            request_id=request_id,
            messages=read_messages(asked.messages or [], body),
            prompt=asked.prompt,
            adds_special=asked.add_special_tokens is not False,
            max_tokens=1,
        )
        if asked.messages is not None:
            generate = with_template(generate, asked)
        return Call(generate, is_stream=False, reply=_NoReply(), ignored=ignored)


class Detokenize(_Tokens):
    """Detokenization; see `afferent.builtin.apis.api.Api`."""

    name = parameters.DETOKENIZE
    path = "/detokenize"
    request_type = DetokenizeRequest
    example: Mapping[str, Any] = {"tokens": [71, 322, 297]}

    def __init__(self) -> None:
        self._reader = schema.Reader(DetokenizeRequest, self.name)

    def parse(
        self,
        body: ReceivedBody,
        *,
        request_id: str,
        model: ModelNames,
        refuses_unknown: bool = False,
    ) -> Call:
        asked, ignored = self._reader.read(body.json, served=model, refuses_unknown=refuses_unknown)
        schema.check_all_taken(body.media, "tokens")
        generate = GenerateRequest(request_id=request_id, prompt=tuple(asked.tokens), max_tokens=1)
        return Call(generate, is_stream=False, reply=_NoReply(), ignored=ignored)


def tokens_body(rendered: Rendered) -> dict[str, Any]:
    return {
        "count": len(rendered.token_ids),
        "max_model_len": rendered.max_model_len,
        "tokens": rendered.token_ids,
        "token_strs": None,
    }


def text_body(rendered: Rendered) -> dict[str, Any]:
    return {"prompt": rendered.text}


class _NoReply:
    """Empty answer, as no answer is generated; see `afferent.builtin.pipeline.call.Reply`."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return {}

    def begin(self) -> list[bytes]:
        return []

    def output(self, output: Output) -> list[bytes]:
        return []

    def finish(self) -> list[bytes]:
        return []

    def fail(self, error: AfferentError) -> list[bytes]:
        return []
