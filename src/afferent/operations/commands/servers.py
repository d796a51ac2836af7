"""Running servers, identified by their supervisors."""

from __future__ import annotations

from afferent.errors import ConfigError
from afferent.operations.commands.daemons import listening
from afferent.operations.supervisor.control import SOCKET_NAME
from afferent.runtime.sockets import digits_of


def choose(pid: int | None) -> str:
    """Return the address of a server's supervisor; its folder has all sockets of the server.

    Raises:
        ConfigError: No server runs, or several do and none was chosen.
    """
    servers = {pids[0]: address for address, pids in listening() if digits_of(address, SOCKET_NAME)}
    if pid is not None:
        servers = {known: address for known, address in servers.items() if known == pid}
    if len(servers) == 1:
        return next(iter(servers.values()))
    if not servers:
        raise ConfigError("you run no server" if pid is None else f"--pid {pid}: is no server")
    running = ", ".join(map(str, sorted(servers)))
    raise ConfigError(f"several servers run; choose one with --pid: {running}")
