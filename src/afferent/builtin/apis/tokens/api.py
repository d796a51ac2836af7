"""``/tokenize`` and ``/detokenize``, as in vLLM: tokens of a text or conversation, and back.

No answer is generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta

from afferent.builtin.apis import openai, parameters, schema
from afferent.builtin.apis.asking import BuiltinApi, with_template
from afferent.builtin.apis.chat.input import read_messages
from afferent.builtin.apis.chat.schema import ChatMessage
from afferent.builtin.pipeline.call import Answer, Call
from afferent.builtin.pipeline.request import GenerateRequest, Output, Rendered
from afferent.errors import AfferentError, InvalidRequest, Param
from afferent.media.body.received import ReceivedBody
from afferent.proxy.dialects import OpenAIDialect
from afferent.types import TokenId

_TOKENIZE = OpenAIDialect(
    name=parameters.TOKENIZE,
    path="/tokenize",
    id_prefix="tokens-",
    params={Param.MESSAGES: "messages"},
)
_DETOKENIZE = replace(_TOKENIZE, name=parameters.DETOKENIZE, path="/detokenize")

_Messages = Annotated[list[ChatMessage], Meta(min_length=1)]


class TokenizeRequest(schema.ConversationRequest, frozen=True, kw_only=True):
    """Request with either ``prompt`` or ``messages``."""

    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(schema.AnyRequest, frozen=True, kw_only=True):
    tokens: Annotated[list[TokenId], Meta(min_length=1, max_length=2**20)]


class Tokenize(BuiltinApi[TokenizeRequest]):
    """Tokenization; see `afferent.builtin.apis.api.Api`."""

    dialect = _TOKENIZE
    reader = schema.Reader(TokenizeRequest, parameters.TOKENIZE)
    media_keys = openai.MEDIA_KEYS
    example: Mapping[str, Any] = {"prompt": "a red circle"}

    def translate(self, request: TokenizeRequest, body: ReceivedBody, request_id: str) -> Call:
        if (request.prompt is None) is (request.messages is None):
            raise InvalidRequest("one of prompt and messages is needed", param="prompt")
        generate = GenerateRequest(
            request_id=request_id,
            messages=read_messages(request.messages or [], body),
            prompt=request.prompt,
            adds_special=request.add_special_tokens is not False,
            is_only_counted=True,
        )
        if request.messages is not None:
            generate = with_template(generate, request)
        return Call(generate, is_stream=False, reply=_NoReply())


class Detokenize(BuiltinApi[DetokenizeRequest]):
    """Detokenization; see `afferent.builtin.apis.api.Api`."""

    dialect = _DETOKENIZE
    reader = schema.Reader(DetokenizeRequest, parameters.DETOKENIZE)
    media_keys = openai.MEDIA_KEYS
    example: Mapping[str, Any] = {"tokens": [71, 322, 297]}

    def translate(self, request: DetokenizeRequest, body: ReceivedBody, request_id: str) -> Call:
        schema.check_all_taken(body.media, "tokens")
        generate = GenerateRequest(
            request_id=request_id, prompt=tuple(request.tokens), is_only_counted=True
        )
        return Call(generate, is_stream=False, reply=_NoReply())


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
