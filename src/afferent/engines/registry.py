"""Registry of engines: from an engine's name to its description.

``--engine`` is the name of an entry point in the group `GROUP`, by which an installed package
offers an engine, or ``MODULE:FACTORY``; an entry point names the same. The factory is called
without arguments and returns an `EngineKind` or an `UpstreamKind`; a subclass is a factory too.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from afferent.config import Settings
from afferent.engines.contract import EngineKind, UpstreamKind
from afferent.errors import ConfigError, in_a_line

GROUP: Final = "afferent.engines"

AnyKind = EngineKind[Any, Any] | UpstreamKind[Any, Any]

BUILT_IN: Mapping[str, str] = {
    "reference": "afferent.builtin.engine.kind:ReferenceEngine",
    "vllm": "afferent.engines.vllm.kind:VllmUpstream",
    "openai": "afferent.engines.openai.kind:OpenAIUpstream",
    "render": "afferent.engines.render:RenderKind",
}
"""Engines of this package; they are also declared as entry points.

They are not looked up there: that reads every package's metadata, and the entry points are missing
where the sources were never installed.
"""


def find(name: str) -> AnyKind:
    """Return the description of the engine with this name.

    Raises:
        ConfigError: There is no such engine, or it is unusable; one line gives the reason.
    """
    if ":" in name:
        # Its processes are started with `python -m`, which looks in the current folder too.
        if (here := str(Path.cwd())) not in sys.path:
            sys.path.insert(0, here)
        return _made(name, name)
    offered = BUILT_IN if name in BUILT_IN else {**_installed(), **BUILT_IN}
    if name not in offered:
        choices = ", ".join(sorted(offered))
        raise ConfigError(
            f"--engine {shlex.quote(name)}: must be one of {choices}, or MODULE:FACTORY"
        )
    return _made(name, offered[name])


def _installed() -> dict[str, str]:
    return {point.name: point.value for point in metadata.entry_points(group=GROUP)}


def _made(name: str, path: str) -> AnyKind:
    chosen = f"--engine {shlex.quote(name)}"
    module_name, _, attribute = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
        made = factory()
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(f"{chosen}: {path} can't be loaded: {in_a_line(error)}") from error
    if not isinstance(made, EngineKind | UpstreamKind):
        raise ConfigError(f"{chosen}: {path} gives a {type(made).__name__}, which is no EngineKind")
    if missing := list(_missing(made)):
        raise ConfigError(f"{path} lacks {', and '.join(missing)} (engine {name!r})")
    return made


_TYPES: Final = {"settings_type": Settings, "link_type": Struct}


def _missing(kind: AnyKind) -> Iterator[str]:
    """Yield the members that a description lacks besides its abstract methods."""
    for member in ("name", "summary"):
        if not isinstance(getattr(kind, member, None), str):
            yield f"{member}, a text"
    for member, base in _TYPES.items():
        found = getattr(kind, member, None)
        if not (isinstance(found, type) and issubclass(found, base)):
            yield f"{member}, a subclass of {base.__name__}"
