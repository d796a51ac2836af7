"""All that can be refused before a process is started, but for the port and what only the model's
own processor can tell.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from afferent.config import Loaded, ServeConfig, Settings
from afferent.engine import registry
from afferent.errors import ConfigError
from afferent.server import sizing

BUILT_IN_MODELS = Path(__file__).parent.parent / "models"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What is to be served, and how memory is divided."""

    folder: Path
    """Of the model."""
    engine: registry.AnyKind
    engine_settings: Settings
    arena_nbytes: int
    left_nbytes: int
    """Memory beside the arena and all that is taken."""


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
        folder=folder,
        engine=engine,
        engine_settings=settings,
        arena_nbytes=arena_nbytes,
        left_nbytes=sizing.left_nbytes(
            config, engine_nbytes=engine_nbytes, arena_nbytes=arena_nbytes
        ),
    )


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
