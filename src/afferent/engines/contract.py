"""Contract between a server and an engine's package: how an engine is chosen, started and reached.

``afferent serve --engine NAME`` finds a description (`afferent.engines.registry`), checks it,
counts its memory, and starts its processes; each frontend connects to them. A description is a
subclass of `EngineKind`. The supervisor and each frontend import it, so its module imports neither
torch nor anything else that takes long: slow imports belong into the processes that it names.

`Backend` has the part of a description that concerns the start. An `EngineKind` adds how frontends
get an `Engine`, which takes token ids and handles. An `UpstreamKind` adds how they get an
`Upstream`: a server with its own API, to which requests are forwarded.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, TypeVar

from msgspec import Struct

from afferent.config import Settings
from afferent.engines.protocol import Engine
from afferent.engines.upstream import Upstream
from afferent.errors import UnsupportedModel
from afferent.media.families.registry import AnyFamily
from afferent.media.transforms.resize import ResizeRule
from afferent.types import ObjectKind

SettingsT = TypeVar("SettingsT", bound=Settings)
LinkT = TypeVar("LinkT", bound=Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSite:
    """Environment in which an engine runs.

    Attributes:
        model_folder: Folder of the weights and the tokenizer.
        model_name: The model's name in requests and answers.
        family: The model's family; ``None`` if no features are made for the model, which an
            upstream may do without.
        store_address: Address of the store, for each process of the engine that reads features.
        shares: The region share of each kind of object in the arena.
        left_nbytes: Memory that is left to the server beside the arena, all processes, and the
            bytes that the engine has reserved; an engine may divide it as it likes.
        has_tier: Whether a tier beyond this machine may have embeddings.
        aliases: Other names of the model that clients may use.
    """

    model_folder: Path
    model_name: str
    family: AnyFamily | None
    store_address: str
    shares: Mapping[ObjectKind, float]
    left_nbytes: int
    has_tier: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def needed_family(self) -> AnyFamily:
        """Return the family.

        Raises:
            UnsupportedModel: No features are made for the model.
        """
        if self.family is None:
            raise UnsupportedModel("no features are made for this model")
        return self.family


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcess:
    """Process of an engine: ``python -m module FD``, restarted whenever it ends.

    - It reads its settings from `ChildProcess.start`, calls `report(..., ready=True)` once it is
      usable, and ends on SIGTERM.
    - A program that is no Python module is the child of one that watches it.
    - A process that ends because a partner process is gone ends with `LOST_PARTNERS`. Any other end
      before it was ready counts as a failed start; the server takes three of these.
    - A process that sends heartbeats (`ChildProcess.keep_beating`) is killed and restarted when
      they stop.

    Attributes:
        name: Its name in log lines; no other process of the server has it.
        module: The module that ``python -m`` runs.
        settings: The settings that it gets at each start.
        fds: Descriptors that it inherits, under the same numbers. The server owns them from now on,
            and keeps them open for the next start.
        env: Added to its environment, which has none of the server's own settings.
        watches: Child processes for which it sends heartbeats (`ChildProcess.beat`) as long as they
            make progress: ``/ready`` names those that hang. The process itself ends them.
    """

    name: str
    module: str
    settings: Struct
    fds: tuple[int, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    watches: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan(Generic[LinkT]):
    """Processes and addresses of an engine.

    Attributes:
        processes: The processes in the order of their start; none for an engine that runs
            elsewhere, or in the frontends.
        link: All that a frontend needs to reach the engine: addresses, and secrets of this start.
        notes: Lines for the operator.
        files: Files that are removed when the server ends.
        start_timeout_s: Time that ``afferent restart engine`` waits until its processes are ready;
            the others are then killed, and restarted.
    """

    processes: tuple[EngineProcess, ...]
    link: LinkT
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    start_timeout_s: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Frontend that connects to the engine.

    Attributes:
        name: The frontend's name, new for each process.
        store_address: The store's address, for the frontend and the engine.
    """

    name: str
    store_address: str


class Backend(ABC, Generic[SettingsT, LinkT]):
    """Program that answers requests, as far as it must be started. It is created without arguments.

    Attributes:
        name: Its name.
        summary: Its purpose, in a few words; the server prints it at its start.
        settings_type: Its own settings, which stand beside the server's: as flags, variables and
            keys of the file.
        link_type: Type of the link that the supervisor's process sends to frontends.
        resize_rule: How a model's own processor resizes in this engine's environment.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    settings_type: type[SettingsT]
    link_type: type[LinkT]
    resize_rule: ClassVar[ResizeRule] = "pillow"
    takes_mistrals: ClassVar[bool] = False
    """Whether the engine reads models in Mistral's own format."""

    def resize_rule_of(self, settings: SettingsT) -> ResizeRule:
        """Return the rule of `resize_rule`; a backend may have a setting for it."""
        return self.resize_rule

    def config_of(self, model_folder: Path, settings: SettingsT) -> Mapping[str, Any] | None:
        """Return the model's configuration if the engine reads another than ``config.json``."""
        return None

    def check(self, model_folder: Path, settings: SettingsT) -> None:
        """Refuse unusable models and settings before a process is started.

        Raises:
            ConfigError: The engine can't run this model, or not with these settings.
            UnsupportedModel: Likewise.
        """

    def needs_weights(self, settings: SettingsT) -> bool:
        """Whether the folder must have the model's weights; they are downloaded from a hub then."""
        return True

    @abstractmethod
    def reserved_nbytes(self, model_folder: Path, settings: SettingsT) -> int:
        """Return the machine's memory that its processes take regardless of the load, and retain
        for finished requests; the arena gets a part of the rest.
        """

    @abstractmethod
    def plan(self, site: EngineSite, settings: SettingsT) -> EnginePlan[LinkT]:
        """Return the processes to start, and the link to them.

        It is called once, in the supervisor; for an `EngineKind` also by ``afferent config check``:
        all that it creates ends with its caller.

        Raises:
            ConfigError: An error that `check` could not find.
        """


class EngineKind(Backend[SettingsT, LinkT]):
    """Backend that takes token ids and handles."""

    @abstractmethod
    def connect(self, link: LinkT, caller: Caller) -> AbstractAsyncContextManager[Engine]:
        """Return the engine as this frontend sees it, for as long as the context lasts.

        The context is entered before the engine's processes are ready, and does not wait for them:
        `Engine.info` is ``None`` until then. It reconnects after a lost connection.
        """


NO_MODEL: Final = Path(os.devnull)
"""Folder of a model that only the upstream knows: it has no files."""


class UpstreamKind(Backend[SettingsT, LinkT]):
    """Backend with its own API: it has its own chat templates, tokens and answers."""

    def own_family(self, settings: SettingsT) -> AnyFamily | None:
        """Return the family of an upstream whose model is unknown here: ``MODEL`` is then only a
        name, and the model's folder is `NO_MODEL`. ``None``: the model's folder determines it.
        """
        return None

    @abstractmethod
    def takes_features(self, model_folder: Path, settings: SettingsT) -> bool:
        """Whether features that are made here may replace the media of this model; if not, the
        upstream gets the media as they came.
        """

    @abstractmethod
    def connect(self, link: LinkT, caller: Caller) -> AbstractAsyncContextManager[Upstream]:
        """Return the upstream as this frontend sees it, for as long as the context lasts.

        The context is entered before the upstream is ready, and does not wait for it.
        """
