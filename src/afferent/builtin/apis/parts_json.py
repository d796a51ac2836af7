"""Parts of stored items as JSON, for OpenAI's APIs that show a conversation's items."""

from __future__ import annotations

from typing import Any

from afferent.builtin.pipeline.request import Part, TextPart
from afferent.items.request import DocumentPart, MediaPart


def part_json(part: Part, role: str) -> dict[str, Any]:
    """Return a part as JSON. Its media were sent by the client and are not sent back."""
    match part:
        case TextPart(text):
            return {"type": "output_text" if role == "assistant" else "input_text", "text": text}
        case MediaPart(modality, _, detail):
            kind = f"input_{modality}"
            return {"type": kind, "detail": detail} if kind == "input_image" else {"type": kind}
        case DocumentPart(detail=detail):
            return {"type": "input_file", "detail": detail}
    raise TypeError(f"a {type(part).__name__} is no part of an item")
