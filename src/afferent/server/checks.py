"""All that can be refused before a process is started, but for what only the model's own processor
can tell.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from afferent.config import Loaded, ServeConfig, Settings
from afferent.engine import registry
from afferent.engine.contract import EngineKind, EnginePlan, EngineSite
from afferent.errors import ConfigError
from afferent.preprocess.registry import AnyFamily, describe
from afferent.runtime.listening import Port
from afferent.runtime.sockets import new_address
from afferent.server import sizing

BUILT_IN_MODELS = Path(__file__).parent.parent / "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What is to be served, and how memory is divided."""

    config: ServeConfig
    folder: Path
    """Of the model."""
    family: AnyFamily | None
    """As the folder says; ``None``: only the model's own processor can tell."""
    engine: registry.AnyKind
    engine_settings: Settings
    arena_nbytes: int
    left_nbytes: int
    """Memory beside the arena and all that is taken."""

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.folder.name

    def site(self, family: AnyFamily | None, *, store_address: str) -> EngineSite:
        """Of the engine."""
        return EngineSite(
            model_folder=self.folder,
            model_name=self.model_name,
            family=family,
            store_address=store_address,
            shares=self.config.shares,
            left_nbytes=self.left_nbytes,
        )


def check(loaded: Loaded) -> Checked:
    """Look at the model's folder, the engine and the memory.

    Raises:
        ConfigError: These settings can't be served.
        UnsupportedModel: Nor can this model.
    """
    config = loaded.config
    folder = model_folder(config.model)
    engine = registry.find(config.engine)
    settings: Settings = loaded.of(engine.settings_type)
    engine_nbytes = engine.reserved_nbytes(folder, settings)
    arena_nbytes = sizing.arena_nbytes(config, engine_nbytes=engine_nbytes)
    engine.check(folder, settings)
    return Checked(
        config=config,
        folder=folder,
        family=describe(
            folder,
            reference=config.processor == "reference",
            max_sampled_frames=config.max_sampled_frames,
            resize_rule=engine.resize_rule,
        ),
        engine=engine,
        engine_settings=settings,
        arena_nbytes=arena_nbytes,
        left_nbytes=sizing.left_nbytes(
            config, engine_nbytes=engine_nbytes, arena_nbytes=arena_nbytes
        ),
    )


def rehearse(loaded: Loaded) -> Checked:
    """`check`, and what a start does next; nothing is left of it.

    Raises:
        ConfigError: These settings can't be served.
        UnsupportedModel: Nor can this model.
    """
    checked, config = check(loaded), loaded.config
    Port(config.host, config.port, num_listeners=config.frontends).close()
    # An upstream's plan may write files for a server that somebody else runs.
    if isinstance(checked.engine, EngineKind) and checked.family is not None:
        site = checked.site(checked.family, store_address=new_address("store"))
        plan = checked.engine.plan(site, checked.engine_settings)
        for fd in {fd for process in plan.processes for fd in process.fds}:
            os.close(fd)
        check_processes(plan)
    return checked


def check_processes(plan: EnginePlan[Any]) -> None:
    """
    Raises:
        ConfigError: One of them has no module.
    """
    for process in plan.processes:
        module = process.module
        # Another path is not ours to look at.
        if "PYTHONPATH" not in process.env and (why := _what_is_wrong_with(module)):
            raise ConfigError(f"{module}, the engine's process {process.name!r}, can't run: {why}")


def _what_is_wrong_with(module: str) -> str:
    """Why ``python -m`` could not run it, as far as that is known without running it."""
    try:
        return "" if find_spec(module) else "there is no such module"
    except Exception as error:  # its package is not ours, and may raise anything
        return f"{type(error).__name__}: {error}".splitlines()[0]


def model_folder(name: str) -> Path:
    """The folder of a built-in model, or of one on this machine.

    Raises:
        ConfigError: There is neither.
    """
    built_in = [BUILT_IN_MODELS / name] if "/" not in name else []
    for folder in (*built_in, Path(name).expanduser()):
        if (folder / "config.json").is_file():
            return folder.resolve()
    raise ConfigError(f"{name!r} is neither a built-in model nor a folder with a config.json")


def exposure(config: ServeConfig) -> str:
    """What an operator should know before others can reach the server; empty if nothing."""
    is_loopback = config.host == "localhost" or _is_loopback(config.host)
    if is_loopback or config.api_key or config.tenants:
        return ""
    return f"{config.host} can be reached by others, and no API key is asked for (--api-key)"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, whose address may be any
        return False
