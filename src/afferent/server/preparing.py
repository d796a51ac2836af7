"""All that a start does before a process is started: `afferent serve` goes on from there, and
``afferent config check`` gives it all back.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from afferent.config import Loaded, ServeConfig
from afferent.config.loading import service_variable
from afferent.engine.contract import EnginePlan, UpstreamKind
from afferent.errors import ConfigError, in_a_line
from afferent.preprocess.discover import family_of
from afferent.preprocess.families.adapter import AdapterFamily
from afferent.preprocess.registry import AnyFamily
from afferent.runtime.listening import Port
from afferent.server import hub
from afferent.server.checks import Checked, check, exposure
from afferent.server.parts import Part, Plan
from afferent.store import arena
from afferent.store.daemon.server import InheritedDescriptors

Say = Callable[[str, str], None]
"""Who or what it is about, and what the operator should know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A server of which no process runs yet."""

    checked: Checked
    plan: Plan
    parts: dict[str, Part]
    notes: tuple[tuple[str, str], ...]
    """For the operator; see `Say`."""


def prepare(loaded: Loaded, owned: ExitStack, say: Say, *, may_download: bool = False) -> Prepared:
    """Refuse what can be refused.

    Args:
        owned: Gets what has to go at the end.
        say: Told why it takes seconds, where it does; all else is in `Prepared.notes`.
        may_download: A model that is on a hub, and not in the cache.

    Raises:
        ConfigError: These settings can't be served; nothing is left but what ``owned`` has.
        UnsupportedModel: Nor can this model.
    """
    config = loaded.config
    if may_download and hub.is_name(config.model):
        say("model", f"{config.model}: looking in the cache, and on {hub.endpoint()}")
    checked = check(loaded, may_download=may_download)
    config = checked.config
    port = bind(config)
    owned.callback(port.close)
    page_port = bind_page(config)
    if page_port is not None:
        owned.callback(page_port.close)
    notes: list[tuple[str, str]] = []
    if warning := exposure(config):
        notes.append(("warning", warning))
    if variable := service_variable(os.environ):
        notes.append(("warning", f"{variable} is a Kubernetes service's, and ignored (--port)"))
    family = _family(checked, say)
    if isinstance(checked.engine, UpstreamKind) and family is None:
        notes.append(
            ("model", f"{checked.model_name}: {checked.engine.name} processes its media itself")
        )
    inherited = _inherited(checked, owned)
    site = checked.site(family, store_address=inherited.address)
    engine = checked.engine.plan(site, checked.engine_settings)
    for path in engine.files:
        owned.callback(path.unlink, missing_ok=True)
    for fd in {fd for process in engine.processes for fd in process.fds}:
        owned.callback(os.close, fd)
    _check_processes(engine)
    plan = Plan(
        config=config,
        folder=checked.folder,
        model_name=checked.model_name,
        family=family,
        engine=engine,
        port=port,
        page_port=page_port,
        inherited=inherited,
    )
    notes += [
        ("model", f"{checked.model_name} from {checked.folder}"),
        ("engine", f"{checked.engine.name}: {checked.engine.summary}"),
        *(("engine", note) for note in engine.notes),
    ]
    return Prepared(checked=checked, plan=plan, parts=plan.parts(), notes=tuple(notes))


def bind(config: ServeConfig) -> Port:
    """
    Raises:
        ConfigError: Nobody can listen there, or somebody does.
    """
    try:
        return Port(config.host, config.port, num_listeners=config.frontends)
    except ConfigError as error:
        raise ConfigError(f"--host {config.host}, --port {config.port}: {error.message}") from error


def bind_page(config: ServeConfig) -> Port | None:
    """The live page's, if there is to be one.

    Raises:
        ConfigError: Nobody can listen there, or somebody does.
    """
    if config.ui < 0:
        return None
    try:
        return Port(config.ui_host, config.ui, num_listeners=1)
    except ConfigError as error:
        where = f"--ui-host {config.ui_host}, --ui {config.ui}"
        raise ConfigError(f"{where}: {error.message}") from error


def rehearse(loaded: Loaded, say: Say) -> Checked:
    """`prepare`, and give everything back.

    Raises:
        ConfigError: These settings can't be served.
        UnsupportedModel: Nor can this model.
    """
    with ExitStack() as owned:
        return prepare(loaded, owned, say).checked


def _inherited(checked: Checked, owned: ExitStack) -> InheritedDescriptors:
    arena_fd, path = arena.open_segment(checked.arena_nbytes), checked.config.store_path
    try:
        inherited = InheritedDescriptors.over(arena_fd, path=path)
    except ConfigError as error:
        os.close(arena_fd)
        if not path:
            raise
        raise ConfigError(f"--store-path {path}: {error.message}") from error
    owned.callback(inherited.close)
    return inherited


def _family(checked: Checked, say: Say) -> AnyFamily | None:
    """What features are made for the model; ``None`` if none are, and none have to be.

    Raises:
        UnsupportedModel: None can be made, and they are needed.
    """
    folder, engine, known = checked.folder, checked.engine, checked.family
    if isinstance(engine, UpstreamKind):
        # What the model's own processor makes, the one beside it makes as well.
        is_ours = known is not None and not isinstance(known, AdapterFamily)
        takes_them = engine.takes_features(folder, checked.engine_settings)
        return known if is_ours and takes_them else None
    if known is None:
        say("model", f"{checked.model_name}: asking its own processor (a few seconds)")
    return known or family_of(folder)


def _check_processes(plan: EnginePlan[Any]) -> None:
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
        return in_a_line(error)
