"""Preparation of a start, up to its first process.

`afferent serve` continues from there; ``afferent config check`` releases everything.
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
from afferent.engines.contract import NO_MODEL, EnginePlan, UpstreamKind
from afferent.errors import ConfigError, in_a_line
from afferent.media.families import hub
from afferent.media.families.adapter import AdapterFamily
from afferent.media.families.registry import AnyFamily
from afferent.media.workers.discover import family_of
from afferent.operations.supervisor.checks import Checked, check, exposure, own_family
from afferent.operations.supervisor.parts import Part, Plan
from afferent.runtime.listening import Port
from afferent.store import segment
from afferent.store.daemon.server import InheritedDescriptors

Say = Callable[[str, str], None]
"""Callback with a subject and a message for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Server without running processes."""

    checked: Checked
    plan: Plan
    parts: dict[str, Part]
    notes: tuple[tuple[str, str], ...]
    """Messages for the operator; see `Say`."""


def prepare(loaded: Loaded, owned: ExitStack, say: Say, *, may_download: bool = False) -> Prepared:
    """Check everything, and acquire all that a server needs before its first process.

    Args:
        owned: Gets the cleanup of acquired resources.
        say: Called before slow steps; all other messages are in `Prepared.notes`.
        may_download: Whether a model on a hub that is not in the cache may be downloaded.

    Raises:
        ConfigError: These settings can't be served; all acquired resources are in ``owned``.
        UnsupportedModel: This model can't be served.
    """
    config = loaded.config
    if may_download and hub.is_name(config.model) and own_family(loaded) is None:
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
        is_upstream=isinstance(checked.engine, UpstreamKind),
        port=port,
        page_port=page_port,
        inherited=inherited,
    )
    notes += [
        ("model", _origin(checked)),
        ("engine", f"{checked.engine.name}: {checked.engine.summary}"),
        *(("engine", note) for note in engine.notes),
    ]
    return Prepared(checked=checked, plan=plan, parts=plan.parts(), notes=tuple(notes))


def _origin(checked: Checked) -> str:
    if checked.folder == NO_MODEL:
        return f"{checked.model_name}, which {checked.engine.name} knows"
    return f"{checked.model_name} from {checked.folder}"


def bind(config: ServeConfig) -> Port:
    """Bind the port of the API.

    Raises:
        ConfigError: The address can't be used, or another process listens there.
    """
    try:
        return Port(config.host, config.port, num_listeners=config.frontends)
    except ConfigError as error:
        raise ConfigError(f"--host {config.host}, --port {config.port}: {error.message}") from error


def bind_page(config: ServeConfig) -> Port | None:
    """Bind the live page's port; ``None`` without a page.

    Raises:
        ConfigError: The address can't be used, or another process listens there.
    """
    if config.ui < 0:
        return None
    try:
        return Port(config.ui_host, config.ui, num_listeners=1)
    except ConfigError as error:
        where = f"--ui-host {config.ui_host}, --ui {config.ui}"
        raise ConfigError(f"{where}: {error.message}") from error


def rehearse(loaded: Loaded, say: Say) -> Checked:
    """Run `prepare` as a dry run, and release everything.

    Raises:
        ConfigError: These settings can't be served.
        UnsupportedModel: This model can't be served.
    """
    with ExitStack() as owned:
        return prepare(loaded, owned, say).checked


def _inherited(checked: Checked, owned: ExitStack) -> InheritedDescriptors:
    arena_fd, path = segment.open_segment(checked.arena_nbytes), checked.config.store_path
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
    """Return the family that computes the features; ``None`` if none is needed.

    Raises:
        UnsupportedModel: Features are needed, and no family can compute them.
    """
    folder, engine, known = checked.folder, checked.engine, checked.family
    if isinstance(engine, UpstreamKind):
        # An upstream runs the model's own processor itself, so the adapter family adds nothing.
        is_ours = known is not None and not isinstance(known, AdapterFamily)
        takes_them = engine.takes_features(folder, checked.engine_settings)
        return known if is_ours and takes_them else None
    if known is None:
        say("model", f"{checked.model_name}: asking its own processor (a few seconds)")
    return known or family_of(folder)


def _check_processes(plan: EnginePlan[Any]) -> None:
    """Check that the engine's processes have modules.

    Raises:
        ConfigError: One of them has no module.
    """
    for process in plan.processes:
        module = process.module
        # modules on another path can't be checked here
        if "PYTHONPATH" not in process.env and (why := _what_is_wrong_with(module)):
            raise ConfigError(f"{module}, the engine's process {process.name!r}, can't run: {why}")


def _what_is_wrong_with(module: str) -> str:
    """Return why ``python -m`` can't run a module, as far as known without running it."""
    try:
        return "" if find_spec(module) else "there is no such module"
    except Exception as error:  # importing its package may raise anything
        return in_a_line(error)
