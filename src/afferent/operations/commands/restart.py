"""``afferent restart``: request a restart from a server's supervisor, and show its progress."""

from __future__ import annotations

import argparse
import contextlib
import socket
from collections.abc import Iterator

import msgspec

from afferent.errors import ConfigError
from afferent.operations.commands import daemons
from afferent.operations.supervisor.control import Progress, Question

_CONNECT_TIMEOUT_S = 5.0


def run(args: argparse.Namespace) -> int:
    """Restart, and print the progress; return the exit status.

    Raises:
        ConfigError: The requested server is ambiguous, or does not answer.
    """
    last = Progress(text="the server has ended meanwhile", failed=True)
    for last in _ask(daemons.choose_server(args.pid), Question(restart=args.what)):
        print(last.text, flush=True)
    if not last.is_done:
        print("the server has ended meanwhile")
    return 0 if last.is_done and not last.failed else 1


def _ask(address: str, question: Question) -> Iterator[Progress]:
    """Yield the supervisor's messages until the restart is done."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_CONNECT_TIMEOUT_S)
        try:
            sock.connect(address)
        except OSError as error:
            raise ConfigError(f"the server does not answer: {error.strerror}") from error
        sock.settimeout(None)  # a large model may load for half an hour
        sock.sendall(msgspec.json.encode(question) + b"\n")
        # If the connection ends without an answer, the server has ended.
        with sock.makefile("rb") as lines, contextlib.suppress(ConnectionResetError):
            for line in lines:
                yield msgspec.json.decode(line, type=Progress)
