"""Running store daemons and servers, and connections to them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from afferent.errors import ConfigError, StoreUnavailable
from afferent.operations.supervisor.control import SOCKET_NAME as CONTROL_NAME
from afferent.runtime.sockets import digits_of
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.client_table import start_time
from afferent.store.daemon.launch import DAEMON
from afferent.store.daemon.server import SOCKET_NAME
from afferent.store.protocol.results import ClientInfo, Statistics

CLIENT_NAME = "afferent store"
"""Client name of these commands."""

_LISTENING = 0x10000
_CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Running:
    """Store that listens. ``owner_pid`` started the daemon and starts the next one.

    ``daemon_pid`` is None while no daemon runs; ``owner_pid`` if it is not visible.
    """

    address: str
    daemon_pid: int | None
    owner_pid: int | None

    def __str__(self) -> str:
        pid = "restarting" if self.daemon_pid is None else f"pid {self.daemon_pid}"
        owner = "" if self.owner_pid is None else f", started by {self.owner_pid}"
        return f"{self.address}  {pid}{owner}"

    def connect(self) -> DaemonStore:
        """Return a connection that can only read and evict.

        Raises:
            StoreUnavailable: The daemon does not answer.
        """
        try:
            return DaemonStore(self.address, name=CLIENT_NAME, timeout_s=_CONNECT_TIMEOUT_S)
        except StoreUnavailable as error:
            raise StoreUnavailable(
                f"{error.message}: {self}. After a restart it serves nobody until every process "
                "has let go of the arena as it was before"
            ) from error


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Statistics and clients of a store, without the client that requests them."""

    running: Running
    statistics: Statistics
    clients: list[ClientInfo]

    @classmethod
    def take(cls, running: Running, store: DaemonStore) -> Snapshot:
        """Request a snapshot.

        Raises:
            StoreUnavailable: The daemon is gone.
        """
        statistics = store.stat()
        return cls(
            running,
            replace(statistics, num_clients=statistics.num_clients - 1),
            [client for client in store.list_clients() if not _is_self(client)],
        )


def _is_self(client: ClientInfo) -> bool:
    return client.pid == os.getpid() and client.name == CLIENT_NAME


def find() -> list[Running]:
    """Return this user's stores, by address.

    Read from /proc: a connection to each store would show in its log.
    """
    found = [_running(address, pids) for address, pids in listening()]
    # A store at a path of the user's choice is recognized only by its daemon.
    stores = [one for one in found if short(one.address) != one.address or one.daemon_pid]
    return sorted(stores, key=lambda running: running.address)


def listening() -> Iterator[tuple[str, list[int]]]:
    """Yield each socket that listens at a path, with this user's processes that have it open."""
    sockets = dict(_listening(Path("/proc/net/unix").read_text()))
    owners: dict[int, list[int]] = {}
    for pid in _own_processes():
        for inode in sockets.keys() & _sockets_of(pid):
            owners.setdefault(inode, []).append(pid)
    for inode, pids in owners.items():
        yield sockets[inode], pids


def choose_server(pid: int | None) -> str:
    """Return the address of a server's supervisor; its folder has all sockets of the server.

    Raises:
        ConfigError: No server runs, or several do and none was chosen.
    """
    servers = {
        pids[0]: address for address, pids in listening() if digits_of(address, CONTROL_NAME)
    }
    if pid is not None:
        servers = {known: address for known, address in servers.items() if known == pid}
    if len(servers) == 1:
        return next(iter(servers.values()))
    if not servers:
        raise ConfigError("you run no server" if pid is None else f"--pid {pid}: is no server")
    running = ", ".join(map(str, sorted(servers)))
    raise ConfigError(f"several servers run; choose one with --pid: {running}")


def short(address: str) -> str:
    """Return enough to identify a store: the digits in its address, or a chosen path."""
    return digits_of(address, SOCKET_NAME) or address


def choose(running: Sequence[Running], name: str | None) -> Running:
    """Return the store whose address begins with ``name``, or the only one.

    Raises:
        StoreUnavailable: None runs.
        ConfigError: ``name`` matches none or several, or is missing while several run.
    """
    if not running:
        raise StoreUnavailable(
            "you run no store; 'afferent serve' and 'afferent store run' start one"
        )
    matching = [
        one
        for one in running
        if name is None or name == one.address or short(one.address).startswith(name)
    ]
    if len(matching) == 1:
        return matching[0]
    if name is None:
        problem = "several stores run; choose one with --address"
    elif matching:
        problem = f"several stores have an address that begins with {name!r}"
    else:
        problem = f"no store has the address {name!r}; these run"
    raise ConfigError("\n  ".join([problem + ":", *map(str, matching or running)]))


def confirm(running: Running, command: str) -> None:
    """Confirm a store that the user has not named.

    Raises:
        ConfigError: The user declines, or there is no terminal.
    """
    named = f"{command} --address {short(running.address)}"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(f"say which store is meant, though only one runs: {named}")
    print(f"{running}\n{command} on this store? [y/N] ", end="", flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was removed")


def _listening(table: str) -> Iterator[tuple[int, str]]:
    """Yield inode and path of each listening socket in the text of /proc/net/unix."""
    for line in table.splitlines()[1:]:
        fields = line.split(maxsplit=7)  # number, references, protocol, flags, type, state, inode
        if len(fields) == 8 and fields[7][0] == "/" and int(fields[3], 16) & _LISTENING:
            yield int(fields[6]), fields[7]


def _own_processes() -> Iterator[int]:
    uid = os.getuid()
    with os.scandir("/proc") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if entry.name.isdecimal() and entry.stat().st_uid == uid:
                    yield int(entry.name)


def _sockets_of(pid: int) -> set[int]:
    """Return the inodes of the sockets that a process has open."""
    found = set()
    with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                target = str(Path(entry.path).readlink())
                if target.startswith("socket:["):
                    found.add(int(target[8:-1]))
    return found


def _running(address: str, pids: Sequence[int]) -> Running:
    """Return the store of a socket, which its daemon and the daemon's starter have open."""
    daemon_pid = next((pid for pid in pids if _is_daemon(pid)), None)
    others = [pid for pid in pids if pid != daemon_pid]
    # A process that the owner has forked may have inherited the socket: the owner is the oldest.
    return Running(address, daemon_pid, min(others, key=start_time, default=None))


def _is_daemon(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return DAEMON.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return False
