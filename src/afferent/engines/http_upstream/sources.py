"""Sources of an upstream's addresses: settings, the addresses of a DNS name, and a watched file."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

from msgspec.structs import replace

from afferent.engines.http_upstream.addresses import Address, parse
from afferent.errors import ConfigError

DNS: Final = "dns+"
FILE: Final = "file:"
_MAX_FILE_NBYTES: Final = 1 << 20
_MAX_SERVERS: Final = 1024


class Source(Protocol):
    """Source of addresses, which may change."""

    @property
    def is_fixed(self) -> bool:
        """Whether the addresses never change."""

    async def look(self) -> Sequence[Address]:
        """Return the present addresses.

        Raises:
            OSError: They can't be found out now.
            ConfigError: They are malformed.
        """
        ...


class _Fixed:
    is_fixed = True

    def __init__(self, address: Address) -> None:
        self._address = address

    async def look(self) -> Sequence[Address]:
        return [self._address]


class _Name:
    """All addresses of a DNS name, such as that of a headless Service of Kubernetes."""

    is_fixed = False

    def __init__(self, address: Address) -> None:
        self._address, parts = address, urlsplit(address.url)
        self._host, self._port = parts.hostname or "", parts.port

    async def look(self) -> Sequence[Address]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        ips = sorted({str(sockaddr[0]) for *_, sockaddr in found})
        return [replace(self._address, ip=ip) for ip in ips]


class _File:
    """File with an address in each line, and perhaps a blank and the server's key."""

    is_fixed = False

    def __init__(self, path: str, api_key: str) -> None:
        self._path, self._api_key = Path(path), api_key

    async def look(self) -> Sequence[Address]:
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[Address]:
        with self._path.open("rb") as file:
            data = file.read(_MAX_FILE_NBYTES + 1)
        if len(data) > _MAX_FILE_NBYTES:
            raise ConfigError(f"{self._path}: the file has more than {_MAX_FILE_NBYTES} bytes")
        if not data:  # perhaps it is being written
            raise ConfigError(f"{self._path}: the file is empty")
        found: list[Address] = []
        for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            try:
                found.append(parse(words[0], api_key="".join(words[1:2]) or self._api_key))
            except ConfigError as error:
                raise ConfigError(f"{self._path}, line {number}: {error.message}") from error
        return found


def source(text: str, *, api_key: str = "") -> Source:
    """Return the source that a setting names.

    Args:
        text: An address as `parse` reads it, ``dns+`` before one with a name, or ``file:PATH``.
        api_key: Key of its servers.

    Raises:
        ConfigError: It is malformed.
    """
    if text.startswith(FILE):
        path = text.removeprefix(FILE)
        if not path.startswith("/"):
            raise ConfigError("must be file: and the absolute path of a file with addresses")
        return _File(path, api_key)
    if text.startswith(DNS):
        address = parse(text.removeprefix(DNS), api_key=api_key)
        if address.url.startswith("unix:"):
            raise ConfigError("must be dns+http://NAME:PORT or dns+https://NAME:PORT")
        return _Name(address)
    return _Fixed(parse(text, api_key=api_key))


class Sources:
    """All sources of an upstream. A source that fails keeps the addresses that it had."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._latest: dict[Source, Sequence[Address]] = {}
        self.failures: dict[Source, str] = {}
        """Errors of the sources that failed at the last look."""

    @property
    def is_fixed(self) -> bool:
        """Whether the addresses never change."""
        return all(each.is_fixed for each in self._sources)

    async def look(self) -> dict[str, Address]:
        """Return the present addresses, by the servers' names."""
        found: dict[str, Address] = {}
        for each in self._sources:
            try:
                self._latest[each] = await each.look()
                self.failures.pop(each, None)
            except (OSError, ValueError, ConfigError) as error:  # of a name, also
                self.failures[each] = str(error)
            found |= {address.name: address for address in self._latest.get(each, ())}
        return dict(list(found.items())[:_MAX_SERVERS])
