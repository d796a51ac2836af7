"""Description of an upstream that speaks HTTP: started here, or elsewhere."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import ClassVar, Final, TypeVar

from msgspec import Struct

from afferent.engines import place
from afferent.engines.contract import Caller, EnginePlan, EngineProcess, EngineSite, UpstreamKind
from afferent.engines.http_upstream.launch import ServerProcess
from afferent.engines.http_upstream.settings import HttpSettings
from afferent.engines.http_upstream.sources import Sources, source
from afferent.engines.upstream import Upstream
from afferent.errors import ConfigError
from afferent.runtime.sockets import digits_of, new_address
from afferent.telemetry.trace import declare_stages

declare_stages("first_byte")

_PROCESS: Final = "afferent.engines.http_upstream.process"
_TO_END_S: Final = 60.0


class HttpLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Link from frontends to an upstream's servers.

    Attributes:
        urls: ``unix:PATH`` or ``http://HOST:PORT``.
        api_key: Sent instead of the client's key, if it is not empty.
        secret: Signs the references.
    """

    urls: tuple[str, ...]
    api_key: str
    secret: bytes

    def sources(self) -> Sources:
        """Return the sources of the servers' addresses."""
        return Sources([source(url, api_key=self.api_key) for url in self.urls])


SettingsT = TypeVar("SettingsT", bound=HttpSettings)
LinkT = TypeVar("LinkT", bound=HttpLink)


class HttpUpstreamKind(UpstreamKind[SettingsT, LinkT]):
    """Description of a server with its own API over HTTP.

    A subclass gives the `command` that starts it. The server listens on a Unix socket, answers
    ``GET /health`` with 200 once it takes requests, and ``GET /metrics`` if it has metrics. It
    finds the store and the secret of references by `afferent.engines.place.find_store`, and reads
    references by `afferent.engines.references.verify`.

    Attributes:
        title: Its name in messages; ``name`` by default.
        folder_variables: Environment variables that name the folder of its own sockets.
    """

    title: ClassVar[str] = ""
    folder_variables: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def command(self, site: EngineSite, settings: SettingsT, socket_path: str) -> tuple[str, ...]:
        """Return the command of a server that listens on ``socket_path``."""

    def link(self, site: EngineSite, settings: SettingsT, shared: HttpLink) -> LinkT:
        """Return the link to the servers; a subclass adds what its client needs."""
        return self.link_type(urls=shared.urls, api_key=shared.api_key, secret=shared.secret)

    def client(self, link: LinkT) -> AbstractAsyncContextManager[Upstream]:
        """Return a client of the servers, which checks their health."""
        from afferent.engines.http_upstream.client import HttpClient  # the supervisor needs none

        return HttpClient.over(link.sources(), title=self.title or self.name, secret=link.secret)

    def needs_weights(self, settings: SettingsT) -> bool:
        """See `Backend.needs_weights`. A server that runs elsewhere has its own weights."""
        return not settings.engine_url

    def reserved_nbytes(self, model_folder: Path, settings: SettingsT) -> int:
        """See `Backend.reserved_nbytes`."""
        return 0 if settings.engine_url else settings.engine_memory_nbytes

    def plan(self, site: EngineSite, settings: SettingsT) -> EnginePlan[LinkT]:
        """See `Backend.plan`."""
        secret = secrets.token_bytes(32)
        if settings.engine_url:
            shared = HttpLink(
                urls=settings.engine_url, api_key=settings.engine_api_key, secret=secret
            )
            return EnginePlan(
                processes=(),
                link=self.link(site, settings, shared),
                notes=(f"{self.title or self.name} at {', '.join(settings.engine_url)}",),
                files=(_share_secret(site.store_address, secret),),
            )
        socket_path, watched = new_address(self.name), f"{self.name}-server"
        process = EngineProcess(
            name=self.name,
            module=_PROCESS,
            settings=ServerProcess(
                title=self.title or self.name,
                process_name=self.name,
                watched_name=watched,
                command=self.command(site, settings, socket_path),
                socket_path=socket_path,
                start_timeout_s=settings.engine_start_timeout_s,
                folder_variables=self.folder_variables,
            ),
            env={
                place.STORE: site.store_address,
                place.SECRET: secret.hex(),
                place.SUPERVISED: "1",
            },
            watches=(watched,),
        )
        shared = HttpLink(urls=(f"unix:{socket_path}",), api_key="", secret=secret)
        return EnginePlan(
            processes=(process,),
            link=self.link(site, settings, shared),
            # The server's parent process ends by itself at its timeout; a little later, it hangs.
            start_timeout_s=settings.engine_start_timeout_s + _TO_END_S,
        )

    def connect(self, link: LinkT, caller: Caller) -> AbstractAsyncContextManager[Upstream]:
        """See `UpstreamKind.connect`."""
        return self.client(link)


def _share_secret(address: str, secret: bytes) -> Path:
    """Write the secret beside the store's path, for a server of the same user."""
    if digits_of(address, "store"):  # a generated path is unknown to a server elsewhere
        raise ConfigError("--engine-url needs --store-path: the engine has to find the store")
    path = Path(address + place.SECRET_SUFFIX)
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_text(secret.hex(), encoding="ascii")
    return path
