"""Server-sent events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


def named_event(value: Mapping[str, Any]) -> bytes:
    """An event of the name that it gives as its ``type``."""
    name: str = value["type"]
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(value) + b"\n\n"
