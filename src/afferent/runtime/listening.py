"""Port that all frontends listen on."""

from __future__ import annotations

import socket

from afferent.errors import ConfigError

BACKLOG = 2048


class Port:
    """Port, bound while the server runs, over all restarts of frontends.

    - A single frontend inherits the one listening socket, so that connections wait while it
      restarts.
    - Several frontends have a socket each (SO_REUSEPORT), and only the frontend has its descriptor.
      The kernel spreads connections evenly over listening sockets, and none goes to a dead
      frontend. With one shared socket, the frontend that is awake would accept most of a burst.
    """

    def __init__(self, host: str, port: int, *, num_listeners: int) -> None:
        """Bind the port.

        Raises:
            ConfigError: Another process listens there, or there is no such address.
        """
        self._family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._is_shared = num_listeners > 1
        if self._is_shared and port:
            # Another server of ours would be accepted, and get a part of the connections.
            self._bind((host, port), reuse_port=False).close()
        self._socket = self._bind((host, port), reuse_port=self._is_shared)
        if self._is_shared:
            # With SO_REUSEADDR, other processes could bind the port too while no frontend listens.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        self._where: tuple[str, int] = self._socket.getsockname()[:2]

    @property
    def url(self) -> str:
        host, port = self._where
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def open(self) -> socket.socket:
        """Return a socket for a frontend; close it once the frontend has started."""
        if self._is_shared:
            return self._bind(self._where, reuse_port=True)
        return self._socket.dup()

    def close(self) -> None:
        """Stop accepting connections, once the frontends have closed their sockets."""
        self._socket.close()

    def _bind(self, where: tuple[str, int], *, reuse_port: bool) -> socket.socket:
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(where)
            if not reuse_port:
                sock.listen(BACKLOG)  # only now a conflict with another listener shows
        except OSError as error:
            sock.close()
            raise ConfigError(f"can't listen on {where[0]}:{where[1]}: {error.strerror}") from error
        return sock
