"""Server-sent events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


def named_event(value: Mapping[str, Any]) -> bytes:
    """Encode an event, named by its ``type``."""
    name: str = value["type"]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
