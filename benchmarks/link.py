"""A link between this process and others: a network namespace, shaped or not, where possible."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from afferent.errors import ConfigError

RATES = ("", "10gbit", "1gbit")
_HERE, _THERE = "10.213.97.1", "10.213.97.2"


@dataclass(frozen=True, slots=True)
class Link:
    """A link; commands that begin with ``there`` run at the other end.

    The other end has the address ``host``, this one ``here``.
    """

    name: str
    host: str
    here: str = "127.0.0.1"
    there: tuple[str, ...] = ()
    device: str = ""

    @property
    def rates(self) -> tuple[str, ...]:
        """Rates to which the link can be shaped; an empty rate is the unshaped link."""
        return RATES if self.device else RATES[:1]

    def num_sent(self) -> int:
        """Return the bytes that have passed in both directions, with all headers.

        Raises:
            ConfigError: There is no device, so that they are not known.
        """
        if not self.device:
            raise ConfigError("a network namespace is needed: run this as root, with iproute2")
        folder = Path("/sys/class/net", self.device, "statistics")
        return sum(int((folder / name).read_text()) for name in ("rx_bytes", "tx_bytes"))

    def shape(self, rate: str) -> None:
        """Limit the rate in both directions with ``tbf``."""
        for before in ((), self.there) if self.device else ():
            device = ["dev", self.device, "root"]
            subprocess.run(
                [*before, "tc", "qdisc", "del", *device], capture_output=True, check=False
            )
            if rate:
                limit = ["tbf", "rate", rate, "burst", "1mb", "latency", "100ms"]
                subprocess.run([*before, "tc", "qdisc", "add", *device, *limit], check=True)


@contextlib.contextmanager
def link() -> Iterator[Link]:
    """Yield a link to a new namespace, or the loopback interface without the rights for one."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        yield Link("loopback", "127.0.0.1")
        return
    name, device = f"afferent-{os.getpid()}", f"aff{os.getpid() % 10**6}"
    there = ("ip", "netns", "exec", name)
    commands = (
        ["ip", "netns", "add", name],
        ["ip", "link", "add", device, "type", "veth", "peer", "name", device, "netns", name],
        ["ip", "addr", "add", f"{_HERE}/24", "dev", device],
        ["ip", "link", "set", device, "up"],
        [*there, "ip", "addr", "add", f"{_THERE}/24", "dev", device],
        [*there, "ip", "link", "set", device, "up"],
        [*there, "ip", "link", "set", "lo", "up"],
    )
    try:
        for command in commands:
            subprocess.run(command, check=True)
        yield Link("veth", _THERE, _HERE, there, device)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)  # noqa: S607


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port
