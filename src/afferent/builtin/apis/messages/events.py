"""Answers of Anthropic Messages, as JSON and as events, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from afferent.builtin.apis.events import named_event
from afferent.builtin.pipeline.call import Answer
from afferent.builtin.pipeline.request import End, Output, PromptInfo, TextDelta, Usage
from afferent.errors import AfferentError
from afferent.proxy.dialects import MESSAGES


def count_body(num_tokens: int) -> dict[str, Any]:
    return {"input_tokens": num_tokens}


class AnthropicReply:
    """Answer with one text block; see `Reply`."""

    def __init__(self, message_id: str, model: str) -> None:
        self._id, self._model = message_id, model
        self._end: End | None = None

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        return self._message(
            content=[_text_block(answer.text)],
            usage=_usage(answer.end.usage),
            **_stop(answer.end),
        )

    def begin(self) -> list[bytes]:
        """Return no frames: the first event contains the prompt length from `PromptInfo`."""
        return []

    def output(self, output: Output) -> list[bytes]:
        match output:
            case PromptInfo(_, num_prompt_tokens):
                usage = _usage(Usage(num_prompt_tokens, 0))
                message = self._message(usage=usage)
                return [
                    _event("message_start", message=message),
                    _event("content_block_start", index=0, content_block=_text_block("")),
                    _event("ping"),
                ]
            case TextDelta(text):
                delta = {"type": "text_delta", "text": text}
                return [_event("content_block_delta", index=0, delta=delta)] if text else []
            case End():
                self._end = output
                return [_event("content_block_stop", index=0)]

    def finish(self) -> list[bytes]:
        if self._end is None:
            return []
        delta = _event("message_delta", delta=_stop(self._end), usage=_usage(self._end.usage))
        return [delta, _event("message_stop")]

    def fail(self, error: AfferentError) -> list[bytes]:
        return [named_event(MESSAGES.error_body(error, self._id))]

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


def _stop(end: End) -> dict[str, Any]:
    met = end.stop if isinstance(end.stop, str) else None  # a token is no sequence
    if end.reason == "length":
        reason = "max_tokens"
    else:
        reason = "end_turn" if met is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": met}


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return named_event({"type": kind, **fields})
