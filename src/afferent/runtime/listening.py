"""The port that all frontends answer on."""

from __future__ import annotations

import socket

from afferent.errors import ConfigError

BACKLOG = 2048


class Port:
    """Bound for as long as the server runs, however often a frontend is started again.

    A frontend that is alone inherits the one listening socket, so that who comes while it is
    started again waits for it. Of several each has a socket of its own (SO_REUSEPORT), of which
    only the frontend has a descriptor: the kernel spreads connections evenly over those that
    listen, and none goes to one that has died. From one socket for all, who is awake would accept
    what waits: most of a burst.
    """

    def __init__(self, host: str, port: int, *, num_listeners: int) -> None:
        """Bind.

        Raises:
            ConfigError: Somebody else listens there, or there is no such address.
        """
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._is_shared = num_listeners > 1
        if self._is_shared and port:
            # Another server of ours would be let in, and get a part of the connections.
            self._bind((host, port), reuse_port=False).close()
        self._socket = self._bind((host, port), reuse_port=self._is_shared)
        if self._is_shared:
            # With it, others could have the port as well for as long as nobody listens.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        self._where: tuple[str, int] = self._socket.getsockname()[:2]

    @property
    def url(self) -> str:
        host, port = self._where
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def open(self) -> socket.socket:
        """The socket of a frontend that is about to be started; to be closed once it has it."""
        if self._is_shared:
            return self._bind(self._where, reuse_port=True)
        return self._socket.dup()

    def close(self) -> None:
        """Let nobody in any more, once the frontends have closed theirs."""
        self._socket.close()

    def _bind(self, where: tuple[str, int], *, reuse_port: bool) -> socket.socket:
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(where)
            if not reuse_port:
                sock.listen(BACKLOG)  # only now is it known whether somebody else does
        except OSError as error:
            sock.close()
            raise ConfigError(f"can't listen on {where[0]}:{where[1]}: {error.strerror}") from error
        return sock
