"""Answers of Anthropic Messages, as JSON and as events, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from afferent.builtin.apis.events import named_event
from afferent.builtin.apis.tools import call_id
from afferent.builtin.pipeline.call import Answer
from afferent.builtin.pipeline.request import (
    CallDelta,
    End,
    Output,
    PromptInfo,
    TextDelta,
    Usage,
)
from afferent.errors import AfferentError
from afferent.proxy.dialects import MESSAGES


def count_body(num_tokens: int) -> dict[str, Any]:
    return {"input_tokens": num_tokens}


class AnthropicReply:
    """Answer of text blocks and tool calls; see `Reply`.

    Invariants:
        - In a stream, block ``_num_blocks - 1`` is open if ``_open`` is set.
    """

    def __init__(self, message_id: str, model: str) -> None:
        self._id, self._model = message_id, model
        self._end: End | None = None
        self._num_blocks = 0
        self._open: Literal["text", "call"] | None = None
        self._has_calls = False

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        return self._message(
            content=self._content(answer),
            usage=_usage(answer.end.usage),
            **_stop(answer.end, has_calls=bool(answer.calls)),
        )

    def begin(self) -> list[bytes]:
        """Return no frames: the first event contains the prompt length from `PromptInfo`."""
        return []

    def output(self, output: Output) -> list[bytes]:
        match output:
            case PromptInfo(_, num_prompt_tokens):
                usage = _usage(Usage(num_prompt_tokens, 0))
                message = self._message(usage=usage)
                return [_event("message_start", message=message)]
            case TextDelta(text):
                return self._text(text) if text else []
            case CallDelta():
                return self._call(output)
            case End():
                self._end = output
                begun = [] if self._num_blocks else self._begin_block("text", _text_block(""))
                return [*begun, *self._end_block()]

    def finish(self) -> list[bytes]:
        if self._end is None:
            return []
        stop = _stop(self._end, has_calls=self._has_calls)
        delta = _event("message_delta", delta=stop, usage=_usage(self._end.usage))
        return [delta, _event("message_stop")]

    def fail(self, error: AfferentError) -> list[bytes]:
        return [named_event(MESSAGES.error_body(error, self._id))]

    def _content(self, answer: Answer) -> list[dict[str, Any]]:
        calls = [
            self._call_block(number, call.name, _arguments(call.arguments))
            for number, call in enumerate(answer.calls)
        ]
        return [_text_block(answer.text), *calls] if answer.text or not calls else calls

    def _call_block(self, number: int, name: str, given: object) -> dict[str, Any]:
        identity = call_id(self._id, 0, number, "toolu_")
        return {"type": "tool_use", "id": identity, "name": name, "input": given}

    # Events

    def _text(self, text: str) -> list[bytes]:
        begun = [] if self._open == "text" else self._begin_block("text", _text_block(""))
        return [*begun, self._delta({"type": "text_delta", "text": text})]

    def _call(self, delta: CallDelta) -> list[bytes]:
        frames: list[bytes] = []
        if delta.name is not None:
            self._has_calls = True
            frames += self._begin_block("call", self._call_block(delta.number, delta.name, {}))
        if delta.arguments:
            piece = {"type": "input_json_delta", "partial_json": delta.arguments}
            frames.append(self._delta(piece))
        return frames

    def _begin_block(self, kind: Literal["text", "call"], block: dict[str, Any]) -> list[bytes]:
        ended = self._end_block()
        self._open, index = kind, self._num_blocks
        self._num_blocks += 1
        begun = _event("content_block_start", index=index, content_block=block)
        return [*ended, begun] if index else [begun, _event("ping")]

    def _end_block(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        return [_event("content_block_stop", index=self._num_blocks - 1)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _message(self, **known: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            **known,
        }


def _arguments(text: str) -> object:
    """Return the arguments of a call; those of an incomplete one are lost."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}


def _stop(end: End, *, has_calls: bool) -> dict[str, Any]:
    met = end.stop if isinstance(end.stop, str) else None  # a token is no sequence
    if end.reason == "length":
        reason = "max_tokens"
    else:
        ended = "tool_use" if has_calls else "end_turn"
        reason = ended if met is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": met}


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return named_event({"type": kind, **fields})
