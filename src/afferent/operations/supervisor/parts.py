"""Processes of a server, and the settings of each.

This imports none of them: the children would wait for a supervisor that imports HTTP servers and
decoders.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from afferent.config import ServeConfig
from afferent.engines.contract import EnginePlan
from afferent.errors import ConfigError
from afferent.media.families.registry import AnyFamily
from afferent.media.workers import launch as preprocess
from afferent.operations.item_events import launch as item_events
from afferent.operations.live_page import launch as live
from afferent.proxy import launch as serve
from afferent.runtime.listening import Port
from afferent.runtime.process import Child
from afferent.runtime.sockets import own_folder
from afferent.store.daemon.launch import DAEMON
from afferent.store.daemon.server import InheritedDescriptors
from afferent.tier import launch as tier
from afferent.types import encode

SUPERVISOR = "supervisor"
"""Name of the process that starts all others."""
_MIN_RECOVERY_S = 60.0
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
"""No progress bars between our lines, and no requests to a hub."""


@dataclass(slots=True, eq=False)
class Part:
    """Process of the server, with all that is needed to restart it.

    Invariants: ``is_ready`` is false without a running ``child``.
    """

    name: str
    module: str
    settings: Callable[[], Struct]
    """Called for each start."""
    fds: tuple[int, ...] = ()
    watches: tuple[str, ...] = ()
    """Names of its own child processes, which it replaces if they hang."""
    port: Port | None = None
    """Port of the process: its settings get ``listener_fd``, a socket for each start."""
    env: dict[str, str] = field(default_factory=dict)
    is_engine: bool = False
    is_frontend: bool = False
    listener: socket.socket | None = None
    """Listening socket of the child. Its successor inherits it, so no waiting client is refused."""
    child: Child | None = None
    pidfd: int = -1
    is_ready: bool = False
    """Whether its running child is ready."""
    has_been_ready: bool = False
    num_failed_starts: int = 0
    last_said: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Common values of all processes of one server."""

    config: ServeConfig
    folder: Path
    """Folder of the model."""
    model_name: str
    family: AnyFamily | None
    engine: EnginePlan[Any]
    is_upstream: bool
    """Whether the engine answers with its own API."""
    port: Port
    page_port: Port | None
    """``None``: there is no live page."""
    inherited: InheritedDescriptors

    def parts(self) -> dict[str, Part]:
        """Return the parts by name, in the order of their start.

        Raises:
            ConfigError: The engine uses the name of another process.
        """
        ours = [self._store(), *self._preprocess(), *self._tier()]
        ours += [*self._frontends(), *self._item_events(), *self._page()]
        engine = self._engine()
        parts = {part.name: part for part in (ours[0], *engine, *ours[1:])}
        every = [name for part in (*ours, *engine) for name in (part.name, *part.watches)]
        if len({SUPERVISOR, *every}) <= len(every):
            names = ", ".join(name for part in engine for name in (part.name, *part.watches))
            raise ConfigError(f"the engine's processes have names that are taken: {names}")
        return parts

    def _engine(self) -> list[Part]:
        return [
            Part(
                process.name,
                process.module,
                partial(_same, process.settings),
                fds=process.fds,
                env=dict(process.env),
                watches=process.watches,
                is_engine=True,
            )
            for process in self.engine.processes
        ]

    def _store(self) -> Part:
        config, inherited = self.config, self.inherited
        segments = itertools.count(1)  # each daemon begins a new epoch: its clients reconnect
        return Part(
            "store",
            DAEMON,
            lambda: inherited.settings(
                next(segments),
                shares=config.shares,
                job_timeout_s=config.preprocess_timeout_s,
                fetch_timeout_s=tier.longest_fetch_s(timeout_s=config.tier_timeout_s),
                # An encoder or a decoder may pin a block as long as one item may take.
                recovery_timeout_s=max(_MIN_RECOVERY_S, config.preprocess_timeout_s),
            ),
            fds=inherited.fds,
        )

    def _preprocess(self) -> list[Part]:
        """Return the preprocess pool; empty if no features are computed."""
        config = self.config
        if self.family is None:
            return []
        settings = preprocess.PoolSettings(
            store_address=self.inherited.address,
            family=self.family,
            limits=config.limits,
            num_workers=config.preprocess_workers,
            item_timeout_s=config.preprocess_timeout_s,
            memory_nbytes=config.preprocess_memory_nbytes,
        )
        env = {**preprocess.ENV, **_QUIET}
        watches = preprocess.worker_names(settings)
        return [Part("preprocess", preprocess.POOL, lambda: settings, env=env, watches=watches)]

    def _tier(self) -> list[Part]:
        """Return the tier process; empty without a tier."""
        config = self.config
        if not config.tier:
            return []
        settings = tier.TierSettings(
            store_address=self.inherited.address,
            url=config.tier,
            secret=config.fleet_secret,
            timeout_s=config.tier_timeout_s,
            wait_s=config.tier_wait_s,
            ttl_s=config.tier_ttl_s,
            max_nbytes=config.tier_max_nbytes,
            write_nbytes_per_s=config.tier_write_nbytes_per_s,
            tenant_nbytes=config.tier_tenant_nbytes,
            nbytes_by_tenant={each.name: each.tier_nbytes for each in config.tenants},
        )
        return [Part(tier.NAME, tier.TIER, lambda: settings)]

    def _frontends(self) -> list[Part]:
        settings = serve.FrontendSettings(
            store_address=self.inherited.address,
            link=msgspec.Raw(encode(self.engine.link)),
            model_folder=str(self.folder),
            model_name=self.model_name,
            family=self.family,
            config=self.config,
            sockets_folder=str(own_folder()),
        )
        module = serve.UPSTREAM_FRONTEND if self.is_upstream else serve.FRONTEND
        return [
            Part(
                f"frontend-{number}",
                module,
                lambda: settings,
                port=self.port,
                env=serve.ENV,
                is_frontend=True,
            )
            for number in range(self.config.frontends)
        ]

    def _item_events(self) -> list[Part]:
        """Return the publisher of item events; empty without an address for them."""
        config = self.config
        if not config.item_events:
            return []
        settings = item_events.PublisherSettings(
            store_address=self.inherited.address,
            endpoint=config.item_events,
            key=config.item_events_key,
        )
        return [Part(item_events.NAME, item_events.PUBLISHER, lambda: settings)]

    def _page(self) -> list[Part]:
        config = self.config
        if self.page_port is None:
            return []
        settings = live.PageSettings(
            sockets_folder=str(own_folder()),
            host=config.ui_host,
            key=config.page_key,
            api_url=self.port.url,
            api_key=config.api_key,
            can_ask=bool(config.api_key) or not config.has_tenants,
            timeout_s=config.timeout_s(is_upstream=False),
        )
        return [Part("page", live.PAGE, lambda: settings, port=self.page_port)]


def _same(settings: Struct) -> Struct:
    return settings
