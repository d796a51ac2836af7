"""Health check of a container: requests ``/health`` from the container's server.

    python -m afferent.operations.commands.health

The port is found as `afferent serve` finds it: by flag, environment or file.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from afferent import config
from afferent.errors import ConfigError

_TIMEOUT_S = 2.0
_PROCESSES = Path("/proc")
_SERVERS = ("serve", "render")
_BEGINS = [["afferent", word] for word in _SERVERS]


def health_url(command: Sequence[str]) -> str:
    """Return the URL of ``/health`` of a server with this command line.

    Raises:
        ConfigError: Its settings can't be read, or the system chose its port.
    """
    start = next((at for at, word in enumerate(command) if word in _SERVERS), len(command))
    arguments = command[start + 1 :]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--host", "--port"):
        parser.add_argument(flag)
    parser.add_argument("--config", type=Path)
    args, _ = parser.parse_known_args(arguments)
    flags = {key: value for key in ("host", "port") if (value := getattr(args, key)) is not None}
    host, port = (config.peek(key, flags, file=args.config) for key in ("host", "port"))
    if port == 0:
        raise ConfigError("--port 0: the system chose the port; set another for a health check")
    return f"http://{_reachable(host)}:{port}/health"


def _reachable(host: str) -> str:
    """Return the address by which this machine reaches a server that listens on ``host``."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return f"[{host}]" if address.version == 6 else host


def _command() -> list[str]:
    """Return the command line of the server; empty if there is none.

    It is not always process 1: containers may share a namespace of pids. Each has its own files.
    """
    ours = (_PROCESSES / "self/ns/mnt").readlink()
    for file in sorted(_PROCESSES.glob("[0-9]*/cmdline"), key=lambda each: int(each.parent.name)):
        with contextlib.suppress(OSError):  # the process has ended
            if (file.parent / "ns/mnt").readlink() != ours:
                continue
            words = file.read_text(errors="replace").split("\0")
            names = [word.rpartition("/")[2] for word in words]
            if any(names[at : at + 2] in _BEGINS for at in range(len(names))):
                return words
    return []


def main() -> int:
    """Return 0 if the server is healthy."""
    try:
        url = health_url(_command())
        urllib.request.urlopen(url, timeout=_TIMEOUT_S).close()  # noqa: S310 it is http
    except (OSError, ConfigError) as error:
        print(f"unhealthy: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
