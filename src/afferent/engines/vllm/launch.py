"""Settings of the process that runs a vLLM."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

SERVER: Final = "vllm-server"
"""Name of vLLM itself in the heartbeat table; its parent process has another name."""


class VllmProcess(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the process; ``command`` listens on ``socket_path``."""

    command: tuple[str, ...]
    socket_path: str
    start_timeout_s: float
