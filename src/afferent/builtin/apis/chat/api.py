"""OpenAI chat completions: translation of requests and answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from afferent.builtin.apis import openai, parameters, schema
from afferent.builtin.apis.asking import BuiltinApi, with_parameters, with_template
from afferent.builtin.apis.chat.input import read_messages
from afferent.builtin.apis.chat.schema import ChatRequest
from afferent.builtin.apis.chat.tools import add_tools
from afferent.builtin.apis.tools import call_id
from afferent.builtin.pipeline.call import Answer, Call, Reply
from afferent.builtin.pipeline.request import (
    CallDelta,
    End,
    GenerateRequest,
    Logprobs,
    Output,
    ScoredToken,
    TextDelta,
)
from afferent.errors import AfferentError, InvalidRequest
from afferent.media.body.received import ReceivedBody
from afferent.proxy.dialects import CHAT


class OpenAIChat(BuiltinApi[ChatRequest]):
    """Chat completions; see `afferent.builtin.apis.api.Api`."""

    dialect = CHAT
    reader = schema.Reader(ChatRequest, parameters.CHAT)
    media_keys = openai.MEDIA_KEYS
    example: Mapping[str, Any] = {"messages": [{"role": "user", "content": "What is a star?"}]}

    def translate(self, chat: ChatRequest, body: ReceivedBody, request_id: str) -> Call:
        generate = GenerateRequest(
            request_id=request_id,
            messages=read_messages(chat.messages, body),
            max_tokens=chat.max_completion_tokens or chat.max_tokens,
            temperature=chat.temperature,
            stop=openai.stops(chat.stop),
            n=chat.n or 1,
            logprobs=_wanted_logprobs(chat),
        )
        generate = with_template(
            with_parameters(generate, chat), chat, effort=chat.reasoning_effort
        )
        generate = add_tools(generate, chat)
        return Call(generate, bool(chat.stream), _reply(chat, request_id))


def _wanted_logprobs(chat: ChatRequest) -> Logprobs | None:
    if chat.logprobs:
        return Logprobs(chat.top_logprobs or 0, openai.scored_token)
    if chat.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs", param="top_logprobs")
    return None


def _reply(chat: ChatRequest, request_id: str) -> Reply:
    with_usage = chat.stream_options is not None and bool(chat.stream_options.include_usage)
    return _ChatReply(chat.model, request_id, chat.n or 1, with_usage=with_usage)


class _ChatReply:
    """Answer in chat completions; see `afferent.builtin.pipeline.call.Reply`."""

    def __init__(self, model: str, request_id: str, num_answers: int, *, with_usage: bool) -> None:
        self._num_answers, self._with_usage = num_answers, with_usage
        self._request_id = request_id
        self._head = {"id": request_id, "created": int(time.time()), "model": model}
        self._ends: list[End] = []
        self._callers: set[int] = set()
        """Answers with tool calls."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": self._message(answer, index),
                "logprobs": _logprobs(answer.logprobs),
                "finish_reason": _reason(answer.end, has_calls=bool(answer.calls)),
                "stop_reason": answer.end.stop,
            }
            for index, answer in enumerate(answers)
        ]
        usage = openai.usage([answer.end.usage for answer in answers])
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}

    def begin(self) -> list[bytes]:
        first = {"role": "assistant", "content": ""}
        return [self._chunk(index, first) for index in range(self._num_answers)]

    def output(self, output: Output) -> list[bytes]:
        match output:
            case TextDelta(text, index, logprobs):
                return [self._chunk(index, {"content": text}, logprobs=_logprobs(logprobs))]
            case CallDelta(index):
                self._callers.add(index)
                return [self._chunk(index, {"tool_calls": [self._call_delta(output)]})]
            case End():
                self._ends.append(output)
                return [self._chunk(output.index, {}, end=output)]
        return []

    def finish(self) -> list[bytes]:
        frames = [b"data: [DONE]\n\n"]
        if self._with_usage:
            usage = openai.usage([end.usage for end in self._ends])
            frames.insert(0, self._event({"choices": [], "usage": usage}))
        return frames

    def fail(self, error: AfferentError) -> list[bytes]:
        return [openai.frame(CHAT.error_body(error, self._request_id))]

    def _message(self, answer: Answer, index: int) -> dict[str, Any]:
        content = answer.text if answer.text or not answer.calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.calls:
            message["tool_calls"] = [
                {
                    "id": call_id(self._request_id, index, number),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(answer.calls)
            ]
        return message

    def _call_delta(self, delta: CallDelta) -> dict[str, Any]:
        piece: dict[str, Any] = {"index": delta.number}
        function = {"arguments": delta.arguments}
        if delta.name is not None:
            identity = call_id(self._request_id, delta.index, delta.number)
            piece |= {"id": identity, "type": "function"}
            function = {"name": delta.name, **function}
        return {**piece, "function": function}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        end: End | None = None,
    ) -> bytes:
        reason = {} if end is None else {"stop_reason": end.stop}
        finish = None if end is None else _reason(end, has_calls=index in self._callers)
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
            **reason,
        }
        usage = {"usage": None} if self._with_usage else {}
        return self._event({"choices": [choice], **usage})

    def _event(self, body: dict[str, Any]) -> bytes:
        return openai.frame({**self._head, "object": "chat.completion.chunk", **body})


def _reason(end: End, *, has_calls: bool) -> str:
    return "tool_calls" if has_calls and end.reason == "stop" else end.reason


def _logprobs(tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
    if not tokens:
        return None
    return {"content": tokens, "refusal": None}
