"""Ports that are free for a server that needs two of them."""

from __future__ import annotations

import contextlib
import socket
from contextlib import ExitStack


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
