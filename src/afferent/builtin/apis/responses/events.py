"""Answers of OpenAI Responses, as JSON and as events, and errors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from afferent.builtin.apis.events import named_event
from afferent.builtin.pipeline.call import Answer
from afferent.builtin.pipeline.collector import AnswerCollector
from afferent.builtin.pipeline.request import End, Output, PromptInfo, ScoredToken, TextDelta, Usage
from afferent.errors import AfferentError, InvalidRequest
from afferent.proxy.dialects import RESPONSES


class ResponsesReply:
    """Answer with one output item, a message, with one text part; see `Reply`."""

    def __init__(self, response_id: str, echo: Mapping[str, Any]) -> None:
        """Create it; ``echo`` has the repeated fields of the request, such as the model's name."""
        self._id, self._echo = response_id, echo
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
        part = _text_part(answer.text, answer.logprobs)
        return self._response(
            status,
            completed_at=self._completed_at,
            incomplete_details=(
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            output=[self._message(status, [part])],
            usage=_usage(answer.end.usage),
        )

    def begin(self) -> list[bytes]:
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
            self._event(
                "response.output_item.added",
                output_index=0,
                item=self._message("in_progress", []),
            ),
            self._part_event("response.content_part.added", part=_text_part("", ())),
        ]

    def output(self, output: Output) -> list[bytes]:
        self._collector.add(output)
        match output:
            case PromptInfo():
                return []
            case TextDelta(text, _, logprobs):
                kind = "response.output_text.delta"
                return [self._part_event(kind, delta=text, logprobs=logprobs)]
            case End():
                return self._end_of_message()

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

    # Events

    def _end_of_message(self) -> list[bytes]:
        (answer,) = self._collector.complete()
        part = _text_part(answer.text, answer.logprobs)
        return [
            self._part_event(
                "response.output_text.done", text=answer.text, logprobs=part["logprobs"]
            ),
            self._part_event("response.content_part.done", part=part),
            self._event(
                "response.output_item.done",
                output_index=0,
                item=self._message(_status(answer.end), [part]),
            ),
        ]

    def _part_event(self, kind: str, **fields: Any) -> bytes:
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
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
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
