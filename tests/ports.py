"""Free ports for servers that can't choose one themselves."""

from __future__ import annotations

import contextlib
import socket
from contextlib import ExitStack


def free_port() -> int:
    """Return a port that is free on the loopback address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def free_pair(*hosts: str) -> int:
    """Return a port that is free on all of these hosts, as is the next one."""
    while True:
        with ExitStack() as stack:
            probe = stack.enter_context(socket.socket())
            probe.bind((hosts[0], 0))
            port: int = probe.getsockname()[1]
            places = [(host, port + step) for host in hosts for step in (0, 1)]
            with contextlib.suppress(OSError, OverflowError):
                for place in places[1:]:
                    stack.enter_context(socket.socket()).bind(place)
                return port
