"""What the process that keeps a vLLM running is told."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

SERVER: Final = "vllm-server"
"""What vLLM itself is called, whose keeper is another process."""


class VllmProcess(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``command`` listens on ``socket_path``."""

    command: tuple[str, ...]
    socket_path: str
    start_timeout_s: float
