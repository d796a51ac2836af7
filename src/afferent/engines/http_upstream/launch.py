"""Settings of the process that runs an upstream."""

from __future__ import annotations

from msgspec import Struct


class ServerProcess(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the parent process of an HTTP server.

    Attributes:
        title: The server's name in messages, such as ``vLLM``.
        process_name: The server's name in log lines.
        watched_name: The server's name in the heartbeat table; its parent process has another name.
        command: The server's command; it listens on ``socket_path``.
        start_timeout_s: Limit of the time until it answers.
        folder_variables: Environment variables that name the folder of the server's own sockets. It
            is removed with this process.
    """

    title: str
    process_name: str
    watched_name: str
    command: tuple[str, ...]
    socket_path: str
    start_timeout_s: float
    folder_variables: tuple[str, ...] = ()
