"""Answers of OpenAI Responses, as JSON and as events, and errors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from afferent.builtin.apis.events import named_event
from afferent.builtin.apis.tools import call_id
from afferent.builtin.pipeline.call import Answer
from afferent.builtin.pipeline.collector import AnswerCollector
from afferent.builtin.pipeline.request import (
    CallDelta,
    CallPart,
    End,
    Output,
    PromptInfo,
    ScoredToken,
    TextDelta,
    Usage,
)
from afferent.errors import AfferentError, InvalidRequest
from afferent.proxy.dialects import RESPONSES


class ResponsesReply:
    """Answer of a message with one text part, and calls of tools; see `Reply`.

    Invariants:
        - In a stream, the item ``_num_items - 1`` is open if ``_open`` is set.
    """

    def __init__(
        self, response_id: str, echo: Mapping[str, Any], *, has_tools: bool = False
    ) -> None:
        """Create it; ``echo`` has the repeated fields of the request, such as the model's name."""
        self._id, self._echo, self._has_tools = response_id, echo, has_tools
        self._num_items = 0
        self._open: Literal["message", "call"] | None = None
        self._open_call = 0
        self._message_id = "msg_" + response_id.removeprefix("resp_")
        self._created_at = int(time.time())
        self._completed_at: int | None = None
        self._num_events = 0
        self._collector = AnswerCollector()

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        status = _status(answer.end)
        if status == "completed" and self._completed_at is None:
            self._completed_at = int(time.time())
        return self._response(
            status,
            completed_at=self._completed_at,
            incomplete_details=(
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            output=self._items(answer, status),
            usage=_usage(answer.end.usage),
        )

    def begin(self) -> list[bytes]:
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def output(self, output: Output) -> list[bytes]:
        self._collector.add(output)
        match output:
            case PromptInfo():
                return []
            case TextDelta(text, _, logprobs):
                if not text and self._open != "message" and self._has_tools:
                    return []  # the tokens begin a call, or are a part of one
                begun = [] if self._open == "message" else self._begin_message()
                kind = "response.output_text.delta"
                return [*begun, self._part_event(kind, delta=text, logprobs=logprobs)]
            case CallDelta(_, number, name, arguments):
                frames = [] if name is None else self._begin_call(number)
                if arguments:
                    kind = "response.function_call_arguments.delta"
                    frames.append(self._call_event(kind, number, delta=arguments))
                return frames
            case End():
                begun = [] if self._num_items else self._begin_message()
                return [*begun, *self._end_item(_status(output))]

    def finish(self) -> list[bytes]:
        answers = self._collector.complete()
        status = _status(answers[0].end)
        return [self._event(f"response.{status}", response=self.whole(answers))]

    def fail(self, error: AfferentError) -> list[bytes]:
        """Return the API's events for an error and for the failed response."""
        known = RESPONSES.error_body(error, self._id)["error"]
        is_clients = isinstance(error, InvalidRequest)
        failed = {
            "code": "invalid_prompt" if is_clients else "server_error",
            "message": known["message"],
        }
        return [
            self._event(
                "error", code=known["code"], message=known["message"], param=known["param"]
            ),
            self._event("response.failed", response=self._response("failed", error=failed)),
        ]

    # Parts of the answer

    def _response(self, status: str, **known: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
            **self._echo,
            **known,
        }

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _items(self, answer: Answer, status: str) -> list[dict[str, Any]]:
        part = _text_part(answer.text, answer.logprobs)
        message = [self._message(status, [part])] if answer.text or not answer.calls else []
        calls = [self._call(status, n, call) for n, call in enumerate(answer.calls)]
        return [*message, *calls]

    def _call(self, status: str, number: int, call: CallPart) -> dict[str, Any]:
        return {
            "id": call_id(self._id, 0, number, "fc_"),
            "type": "function_call",
            "status": status,
            "call_id": call_id(self._id, 0, number),
            "name": call.name,
            "arguments": call.arguments,
        }

    # Events

    def _begin_message(self) -> list[bytes]:
        return [
            *self._begin_item("message", self._message("in_progress", [])),
            self._part_event("response.content_part.added", part=_text_part("", ())),
        ]

    def _begin_call(self, number: int) -> list[bytes]:
        begun = self._collector.call_so_far(number)
        frames = self._begin_item("call", self._call("in_progress", number, begun))
        self._open_call = number
        return frames

    def _begin_item(self, kind: Literal["message", "call"], item: dict[str, Any]) -> list[bytes]:
        ended = self._end_item("completed")
        self._open, index = kind, self._num_items
        self._num_items += 1
        added = self._event("response.output_item.added", output_index=index, item=item)
        return [*ended, added]

    def _end_item(self, status: str) -> list[bytes]:
        kind, self._open = self._open, None
        if kind is None:
            return []
        index = self._num_items - 1
        if kind == "message":
            text, logprobs = self._collector.text_so_far
            part = _text_part(text, logprobs)
            item = self._message(status, [part])
            frames = [
                self._part_event("response.output_text.done", text=text, logprobs=logprobs),
                self._part_event("response.content_part.done", part=part),
            ]
        else:
            number = self._open_call
            call = self._collector.call_so_far(number)
            item = self._call(status, number, call)
            kind_done = "response.function_call_arguments.done"
            frames = [self._call_event(kind_done, number, name=call.name, arguments=call.arguments)]
        done = self._event("response.output_item.done", output_index=index, item=item)
        return [*frames, done]

    def _call_event(self, kind: str, number: int, **fields: Any) -> bytes:
        item_id = call_id(self._id, 0, number, "fc_")
        return self._event(kind, item_id=item_id, output_index=self._num_items - 1, **fields)

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        index = self._num_items - 1
        place = {"item_id": self._message_id, "output_index": index, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number = self._num_events
        self._num_events += 1
        return named_event({"type": kind, "sequence_number": number, **fields})


def _status(end: End) -> str:
    return "completed" if end.reason == "stop" else "incomplete"


def _text_part(text: str, logprobs: Sequence[ScoredToken]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
