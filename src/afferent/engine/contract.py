"""How an engine is chosen, started and reached: what a server asks of an engine's package.

``afferent serve --engine NAME`` finds a description (`afferent.engine.registry`), checks it, counts
its memory, and starts its processes; each frontend connects to them. A description is a subclass of
`EngineKind`. It is imported by the supervisor and by each frontend, so its module imports neither
torch nor anything else that takes long: what does belongs into the processes that it names.

`Backend` is what any description says of its start. An `EngineKind` adds how frontends get an
`Engine`, which takes token ids and handles; an `UpstreamKind`, how they get an `Upstream`: a server
with an API of its own, which a request is passed on to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from msgspec import Struct

from afferent.config import Settings
from afferent.engine.protocol import Engine
from afferent.engine.upstream import Upstream
from afferent.errors import UnsupportedModel
from afferent.preprocess.registry import AnyFamily
from afferent.preprocess.resize import ResizeRule
from afferent.types import ObjectKind

SettingsT = TypeVar("SettingsT", bound=Settings)
LinkT = TypeVar("LinkT", bound=Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSite:
    """Where an engine is to run.

    Attributes:
        model_folder: The weights' and the tokenizer's.
        model_name: As clients call it, and as answers do.
        family: What features are made for the model; ``None`` if there are none, which an upstream
            may do without.
        store_address: Each of the engine's processes that looks at features connects there.
        shares: What part of the arena each kind of object has.
        left_nbytes: Memory that is left to the server beside the arena, all processes, and what
            the engine has reserved; an engine may divide it as it likes.
        has_tier: Whether there is something beyond this machine to look for embeddings in.
        aliases: Other names that clients may call the model by.
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
        """
        Raises:
            UnsupportedModel: No features are made for the model.
        """
        if self.family is None:
            raise UnsupportedModel("no features are made for this model")
        return self.family


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcess:
    """A process of an engine: ``python -m module FD``, started again whenever it ends.

    It reads its settings from `ChildProcess.start`, says `report(..., ready=True)` once it can be
    used, and ends on SIGTERM. What is no Python module is the child of one that watches it. A
    process that ends because one that it works with is gone does so with `LOST_PARTNERS`; any other
    end before it was ready counts as a failed start, of which the server takes three. One that
    beats (`ChildProcess.keep_beating`) is killed and started again when it does so no more.

    Attributes:
        name: In log lines; no other process of the server has it.
        module: What ``python -m`` runs.
        settings: What it is told at each start.
        fds: Descriptors that it inherits, under the same numbers. They are the server's from now
            on, which keeps them open for the next start.
        env: Added to its environment, which has none of the server's own settings.
        watches: Processes of its own that it beats for (`ChildProcess.beat`), as long as it sees
            them go on: ``/ready`` names those that do not. To end them is its own business.
    """

    name: str
    module: str
    settings: Struct
    fds: tuple[int, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    watches: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan(Generic[LinkT]):
    """What a server starts for an engine.

    Attributes:
        processes: In the order in which they are started; none for an engine that runs elsewhere,
            or in the frontends.
        link: All that a frontend has to know to reach it: addresses, and secrets of this start.
        notes: Lines for the operator.
        files: What is removed when the server ends.
        start_timeout_s: How long ``afferent restart engine`` waits until its processes are ready;
            those that are not are then killed, and started again.
    """

    processes: tuple[EngineProcess, ...]
    link: LinkT
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    start_timeout_s: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A frontend that wants to reach the engine.

    Attributes:
        name: New for each process.
        store_address: Where it and the engine find the store.
    """

    name: str
    store_address: str


class Backend(ABC, Generic[SettingsT, LinkT]):
    """What answers requests, as far as it has to be started. It is made without arguments.

    Attributes:
        name: What it calls itself.
        summary: What it is for, in a few words; the server says so at its start.
        settings_type: Settings of its own, which stand beside the server's: as flags, variables and
            keys of the file.
        link_type: What frontends are told, from the supervisor's process to theirs.
        resize_rule: How a model's own processor resizes in this engine's environment.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    settings_type: type[SettingsT]
    link_type: type[LinkT]
    resize_rule: ClassVar[ResizeRule] = "pillow"

    def check(self, model_folder: Path, settings: SettingsT) -> None:
        """Refuse what can be refused before a process is started.

        Raises:
            ConfigError: The engine can't run this model, or not with these settings.
            UnsupportedModel: Likewise.
        """

    def needs_weights(self, settings: SettingsT) -> bool:
        """Whether the folder has to have the model's weights; a hub's are downloaded then."""
        return True

    @abstractmethod
    def reserved_nbytes(self, model_folder: Path, settings: SettingsT) -> int:
        """The machine's memory that its processes take whatever is asked of them, and keep for
        what requests leave behind; the arena is fitted in beside it.
        """

    @abstractmethod
    def plan(self, site: EngineSite, settings: SettingsT) -> EnginePlan[LinkT]:
        """Which processes to start, and how they are reached. Called once, in the supervisor; of
        an `EngineKind` by ``afferent config check``, too: it makes what ends with its caller.

        Raises:
            ConfigError: What `check` could not see.
        """


class EngineKind(Backend[SettingsT, LinkT]):
    """A backend that takes token ids and handles."""

    @abstractmethod
    def connect(self, link: LinkT, caller: Caller) -> AbstractAsyncContextManager[Engine]:
        """The engine as this frontend sees it, for as long as the context lasts.

        It is entered before the engine's processes are ready, and does not wait for them:
        `Engine.info` is ``None`` until then. It sees to it that a lost connection comes back.
        """


class UpstreamKind(Backend[SettingsT, LinkT]):
    """A backend with an API of its own: chat templates, tokens and answers are its own."""

    @abstractmethod
    def takes_features(self, model_folder: Path, settings: SettingsT) -> bool:
        """Whether features that are made here may stand for media of this model; if not, it gets
        them as they came.
        """

    @abstractmethod
    def connect(self, link: LinkT, caller: Caller) -> AbstractAsyncContextManager[Upstream]:
        """The upstream as this frontend sees it, for as long as the context lasts.

        It is entered before the upstream is ready, and does not wait for it.
        """
