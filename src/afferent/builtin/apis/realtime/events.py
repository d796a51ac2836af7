"""Events of the server of OpenAI Realtime, as JSON."""

from __future__ import annotations

import math
from typing import Any, Final, Literal

import msgspec

from afferent.builtin.apis.realtime.schema import AUDIO_RATE_HZ
from afferent.builtin.pipeline.call import Answer
from afferent.builtin.pipeline.live_session import LiveItem, Settings
from afferent.builtin.pipeline.request import Part, TextPart, Usage
from afferent.errors import AfferentError, Unavailable
from afferent.items.request import MediaPart
from afferent.proxy.dialects import OpenAIDialect
from afferent.proxy.responses import new_id

REALTIME: Final = OpenAIDialect(
    name="openai_realtime", path="/v1/realtime", id_prefix="sess_", names_error_events=False
)

Status = Literal["in_progress", "completed", "cancelled", "failed", "incomplete"]


def event(kind: str, **fields: Any) -> str:
    """Encode an event."""
    return msgspec.json.encode({"type": kind, "event_id": new_id("event_"), **fields}).decode()


def error_event(error: AfferentError, event_id: str | None, *, request_id: str = "") -> str:
    """Encode an error.

    Args:
        event_id: Id of the client's event.
    """
    described = error_of(error, request_id)
    return event("error", error={**described, "event_id": event_id})


def error_of(error: AfferentError, request_id: str) -> dict[str, Any]:
    """Return an error as JSON, with the delay of a retry if one makes sense."""
    described: dict[str, Any] = dict(REALTIME.error_body(error, request_id)["error"])
    if isinstance(error, Unavailable):
        described["retry_after"] = math.ceil(error.retry_after_s)
    return described


def session_json(
    settings: Settings, *, session_id: str, model: str, num_items: int, last_id: str | None
) -> dict[str, Any]:
    """Return a session as JSON.

    ``conversation_items`` and ``last_item_id`` are not OpenAI's: after a lost connection, a client
    finds by them which of its items are a part of the session.
    """
    truncation: Any = "auto" if settings.may_truncate else "disabled"
    if settings.retention_ratio is not None:
        limits = {"post_instructions": settings.most_tokens} if settings.most_tokens else None
        truncation = {
            "type": "retention_ratio",
            "retention_ratio": settings.retention_ratio,
            "token_limits": limits,
        }
    window = settings.window
    return {
        "type": "realtime",
        "object": "realtime.session",
        "id": session_id,
        "model": model,
        "output_modalities": ["text"],
        "instructions": settings.instructions,
        "max_output_tokens": _tokens(settings.max_output_tokens),
        "temperature": settings.temperature,
        "truncation": truncation,
        "window": {"seconds": window.seconds, "items": window.items, "tokens": window.tokens},
        "audio": {
            "input": {
                "format": {"type": "audio/pcm", "rate": AUDIO_RATE_HZ},
                "turn_detection": None,
                "transcription": None,
                "noise_reduction": None,
            }
        },
        "tools": [],
        "tool_choice": "auto",
        "prompt": None,
        "tracing": None,
        "include": None,
        "conversation_items": num_items,
        "last_item_id": last_id,
    }


def item_json(item: LiveItem) -> dict[str, Any]:
    """Return an item as JSON. Its media were sent by the client and are not sent back."""
    message = item.turn.message
    return {
        "id": item.id,
        "object": "realtime.item",
        "type": "message",
        "role": message.role,
        "status": item.status,
        "content": [_part_json(part, message.role) for part in message.parts],
    }


def _part_json(part: Part, role: str) -> dict[str, Any]:
    match part:
        case TextPart(text):
            return {"type": "output_text" if role == "assistant" else "input_text", "text": text}
        case MediaPart(modality, _, detail):
            kind = f"input_{modality}"
            return {"type": kind, "detail": detail} if kind == "input_image" else {"type": kind}
    raise TypeError(f"a {type(part).__name__} is no part of an item")


class ResponseEvents:
    """Events of one response, in order.

    Invariants:
        - Each event is made once, by the method of its stage: `begin`, `piece`, `end`.
    """

    def __init__(
        self,
        response_id: str,
        item: LiveItem,
        session_id: str,
        settings: Settings,
        metadata: dict[str, str] | None,
    ) -> None:
        """Create it; ``item`` is the answer that is being written."""
        self.id, self._item = response_id, item
        self._conversation_id = f"conv_{session_id.removeprefix(REALTIME.id_prefix)}"
        self._settings, self._metadata = settings, metadata

    def created(self) -> str:
        return event("response.created", response=self._response("in_progress"))

    def begin(self, before: str | None) -> list[str]:
        """Return the events before the first piece.

        Args:
            before: Id of the item before the answer.
        """
        item = item_json(self._item)
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            event("conversation.item.added", previous_item_id=before, item=item),
            self._part_event("response.content_part.added", part={"type": "text", "text": ""}),
        ]

    def piece(self, text: str) -> list[str]:
        return [self._part_event("response.output_text.delta", delta=text)]

    def end(
        self,
        item: LiveItem,
        text: str,
        status: Status,
        before: str | None,
        usage: dict[str, Any] | None,
        details: dict[str, Any] | None,
    ) -> list[str]:
        """Return the events after the last piece.

        Args:
            item: The answer.
            before: Id of the item before it.
        """
        self._item = item
        described = item_json(item)
        part = {"type": "text", "text": text}
        return [
            self._part_event("response.output_text.done", text=text),
            self._part_event("response.content_part.done", part=part),
            self._event("response.output_item.done", output_index=0, item=described),
            event("conversation.item.done", previous_item_id=before, item=described),
            self.done(status, output=[described], usage=usage, details=details),
        ]

    def done(
        self,
        status: Status,
        *,
        output: list[dict[str, Any]] | None = None,
        usage: dict[str, Any] | None = None,
        details: dict[str, Any] | None = None,
    ) -> str:
        response = self._response(status, output=output or [], usage=usage)
        if details is not None or status != "completed":
            response["status_details"] = {"type": status, **(details or {})}
        return event("response.done", response=response)

    def _response(self, status: Status, **known: Any) -> dict[str, Any]:
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": None,
            "output": [],
            "conversation_id": self._conversation_id,
            "output_modalities": ["text"],
            "max_output_tokens": _tokens(self._settings.max_output_tokens),
            "usage": None,
            "metadata": self._metadata,
            **known,
        }

    def _event(self, kind: str, **fields: Any) -> str:
        return event(kind, response_id=self.id, **fields)

    def _part_event(self, kind: str, **fields: Any) -> str:
        place = {"item_id": self._item.id, "output_index": 0, "content_index": 0}
        return self._event(kind, **place, **fields)


def reason_of(answer: Answer) -> tuple[Status, dict[str, Any] | None]:
    """Return the status of a complete answer, and its details."""
    if answer.end.reason == "stop":
        return "completed", None
    return "incomplete", {"reason": "max_output_tokens"}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Return the tokens of a response."""
    return {
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens,
        "input_token_details": {"cached_tokens": usage.cached_tokens},
        "output_token_details": {"text_tokens": usage.completion_tokens},
    }


def _tokens(limit: int | None) -> int | str:
    return "inf" if limit is None else limit
