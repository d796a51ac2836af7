"""OpenAI completions: the answer continues a text or its tokens; there are no media."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta

from afferent.builtin.apis import forms, openai, parameters, schema
from afferent.builtin.apis.asking import BuiltinApi, with_parameters
from afferent.builtin.apis.openai import StreamOptions
from afferent.builtin.pipeline.call import Answer, Call
from afferent.builtin.pipeline.request import End, GenerateRequest, Output, TextDelta
from afferent.errors import AfferentError, InvalidRequest, Param, UnsupportedParameter
from afferent.media.body.received import ReceivedBody
from afferent.proxy.dialects import OpenAIDialect
from afferent.types import TokenId

DEFAULT_MAX_TOKENS = 16
COMPLETIONS = OpenAIDialect(
    name=parameters.COMPLETIONS,
    path="/v1/completions",
    id_prefix="cmpl-",
    params={Param.MESSAGES: "prompt"},
    names_error_events=False,
)

Text = str | list[Any]
"""Prompt of a client: text, its tokens, or a list of texts or of lists of tokens."""
_MAX_PROMPTS = 1024
"""Largest number of prompts in a request, as in vLLM."""


class CompletionRequest(schema.AnyRequest, frozen=True, kw_only=True):
    prompt: Text
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    max_tokens: schema.MaxTokens | None = None
    n: Annotated[int, Meta(ge=1, le=16)] | None = None
    stop: openai.Stops | None = None
    stream_options: StreamOptions | None = None
    response_format: forms.OutputFormat | None = None
    guided_json: forms.GivenSchema = UNSET
    guided_regex: str | None = None
    guided_choice: list[str] | None = None

    def form(self) -> forms.Form:
        """See `AnyRequest.form`."""
        return forms.of_completions(self, super().form())


class OpenAICompletions(BuiltinApi[CompletionRequest]):
    """Completions; see `afferent.builtin.apis.api.Api`."""

    dialect = COMPLETIONS
    reader = schema.Reader(CompletionRequest, parameters.COMPLETIONS)
    media_keys = openai.MEDIA_KEYS
    example: Mapping[str, Any] = {"prompt": "The picture shows", "max_tokens": 16}

    def translate(self, request: CompletionRequest, body: ReceivedBody, request_id: str) -> Call:
        schema.check_all_taken(body.media, "prompt")
        generate = GenerateRequest(
            request_id=request_id,
            prompt=read_prompt(request.prompt),
            max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
            temperature=request.temperature,
            stop=openai.stops(request.stop),
            n=request.n or 1,
        )
        generate = with_parameters(generate, request)
        return Call(generate, bool(request.stream), _Reply(request, request_id))


def read_prompt(given: Text) -> str | tuple[int, ...]:
    """Return the text or tokens of the only prompt.

    Raises:
        InvalidRequest: It is neither text nor tokens.
        UnsupportedParameter: There are several prompts.
    """
    first, *others = read_prompts(given)
    if others:
        raise UnsupportedParameter("a request has one prompt", param="prompt")
    return first


def read_prompts(given: Text) -> list[str | tuple[int, ...]]:
    """Return the text or tokens of each prompt, of which there is at least one.

    Raises:
        InvalidRequest: One is neither text nor tokens, or there are both kinds, or too many.
    """
    prompts = [given]
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        prompts = given
    if len(prompts) > _MAX_PROMPTS:
        raise InvalidRequest(
            f"a request has at most {_MAX_PROMPTS} prompts, and this one {len(prompts)}",
            param="prompt",
        )
    if len({isinstance(each, str) for each in prompts}) > 1:
        raise InvalidRequest("prompts are either texts or lists of tokens", param="prompt")
    return [_text_or_tokens(each) for each in prompts]


def _text_or_tokens(given: Any) -> str | tuple[int, ...]:
    if isinstance(given, str):
        return given
    try:
        token_ids = msgspec.convert(given, tuple[TokenId, ...])
    except msgspec.ValidationError as error:
        raise InvalidRequest("a prompt is text, or a list of tokens", param="prompt") from error
    if not token_ids:
        raise InvalidRequest("a prompt has at least one token", param="prompt")
    return token_ids


class _Reply:
    """Answer in completions; see `afferent.builtin.pipeline.call.Reply`."""

    def __init__(self, asked: CompletionRequest, request_id: str) -> None:
        options, self._request_id = asked.stream_options, request_id
        self._with_usage = options is not None and bool(options.include_usage)
        self._head = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model,
        }
        self._ends: list[End] = []

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [_choice(i, answer.text, answer.end) for i, answer in enumerate(answers)]
        usage = openai.usage([answer.end.usage for answer in answers])
        return {**self._head, "choices": choices, "usage": usage}

    def begin(self) -> list[bytes]:
        return []

    def output(self, output: Output) -> list[bytes]:
        match output:
            case TextDelta(text, index):
                return [self._event([_choice(index, text, None)])]
            case End():
                self._ends.append(output)
                return [self._event([_choice(output.index, "", output)])]
        return []

    def finish(self) -> list[bytes]:
        done = [b"data: [DONE]\n\n"]
        if self._with_usage:
            done.insert(0, self._event([], openai.usage([end.usage for end in self._ends])))
        return done

    def fail(self, error: AfferentError) -> list[bytes]:
        return [openai.frame(COMPLETIONS.error_body(error, self._request_id))]

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        known = {"usage": usage} if self._with_usage else {}
        return openai.frame({**self._head, "choices": choices, **known})


def _choice(index: int, text: str, end: End | None) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": None if end is None else end.reason,
        "stop_reason": None if end is None else end.stop,
    }
