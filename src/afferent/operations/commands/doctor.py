"""``afferent doctor``: find problems of this machine and of the settings, with a fix for each."""

from __future__ import annotations

import argparse
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from afferent.config import Loaded, ServeConfig, declared
from afferent.engines import registry
from afferent.engines.contract import NO_MODEL
from afferent.errors import AfferentError, ConfigError
from afferent.operations.commands.machine import Finding, findings, found_as, judged
from afferent.operations.commands.settings import print_json
from afferent.operations.commands.tables import make_console
from afferent.operations.supervisor.checks import exposure, model_folder, silent_tier
from afferent.operations.supervisor.preparing import bind, rehearse
from afferent.tier.registry import without_secrets
from afferent.types import MiB

_STYLES = {"ok": "green", "could be better": "yellow", "wrong": "red"}


def run(args: argparse.Namespace, load: Callable[[], Loaded]) -> int:
    """Print all findings; return 1 if something is wrong.

    Args:
        load: Reads the settings; an error in them is a finding, too.
    """
    found = list(_examine(args, load))
    if args.as_json:
        print_json(msgspec.to_builtins(found))
    else:
        _print(found, make_console())
    return 1 if any(finding.level == "wrong" for finding in found) else 0


def _examine(args: argparse.Namespace, load: Callable[[], Loaded]) -> Iterator[Finding]:
    try:
        loaded = load()
    except AfferentError as error:
        mend = "afferent serve --help all lists the settings"
        yield Finding(what="settings", level="wrong", found=error.message, mend=mend)
        yield from findings(num_workers=1, extras=["engine"], needs_shm=False)
        return
    config = loaded.config
    yield Finding(what="settings", level="ok", found=_origins(loaded))
    yield _exposure(loaded)
    if (readable := _readable(loaded, args.config)) is not None:
        yield readable
    values = dict(loaded.values())
    is_parallel = values.get("tensor_parallel_size", 1) != 1
    yield from findings(
        num_workers=config.preprocess_workers,
        extras=["engine"],
        needs_shm=is_parallel or (config.engine == "vllm" and not values.get("engine_url")),
    )
    asked = [
        judged("port", lambda: _port(loaded), "--port with another, or 0 for a free one"),
        judged("model", lambda: _model(loaded)),
        judged("engine", lambda: _engine(loaded)),
        *_tier(loaded),
        judged("start", lambda: _start(loaded)),
    ]
    said = set[str]()
    for finding in asked:  # one cause may fail all later checks: report it once
        if finding.level == "ok" or finding.found not in said:
            yield finding
            said.add(finding.found)


def _origins(loaded: Loaded) -> str:
    given = [key for key, source in loaded.sources.items() if source != "default"]
    return f"set: {', '.join(given)}" if given else "all by default"


def _exposure(loaded: Loaded) -> Finding:
    warning = exposure(loaded.config)
    return found_as(
        *("keys", not warning, warning or "asked for, or only this machine reaches the server"),
        "export AFFERENT_API_KEY=$(openssl rand -hex 24)",
        otherwise="could be better",
    )


def _readable(loaded: Loaded, file: Path | None) -> Finding | None:
    """Check whether other users can read a file that contains keys."""
    settings_type = registry.find(loaded.config.engine).settings_type
    known = declared(ServeConfig, settings_type)
    secrets = [key for key, one in known.items() if one.is_secret or key == "tenants"]
    if file is None or not any(loaded.sources.get(key) == str(file) for key in secrets):
        return None
    if not file.stat().st_mode & stat.S_IROTH:
        return Finding(what="file", level="ok", found=f"only its owner and group read {file}")
    found = f"all users can read {file}, and keys are in it"
    return Finding(what="file", level="could be better", found=found, mend=f"chmod o-r {file}")


def _port(loaded: Loaded) -> str:
    port = bind(loaded.config)
    port.close()
    return port.url


def _folder(loaded: Loaded) -> Path:
    kind = registry.find(loaded.config.engine)
    needs_weights = kind.needs_weights(loaded.of(kind.settings_type))
    return model_folder(loaded, needs_weights=needs_weights)


def _model(loaded: Loaded) -> str:
    folder = _folder(loaded)
    return "known to the engine alone" if folder == NO_MODEL else str(folder)


def _engine(loaded: Loaded) -> str:
    config = loaded.config
    kind = registry.find(config.engine)
    kind.check(_folder(loaded), loaded.of(kind.settings_type))
    return f"{kind.name}: {kind.summary}"


def _tier(loaded: Loaded) -> Iterator[Finding]:
    """Check whether the tier, if any, can be reached; a server runs without it."""
    if not loaded.config.tier:
        return
    try:
        warning = silent_tier(loaded.config)
    except ConfigError:  # `_start` reports it
        return
    found = warning or f"{without_secrets(loaded.config.tier)} answers"
    mend = "afferent tier stat, and the tier's own log"
    yield found_as("tier", not warning, found, mend, otherwise="could be better")


def _start(loaded: Loaded) -> str:
    """Run all checks of a start, for problems that the single checks miss."""
    try:
        checked = rehearse(loaded, lambda *_: None)
    except OSError as error:  # an error of the kernel that no check predicts
        raise ConfigError(f"{error.strerror}: {error.filename or ''}") from error
    return f"all that a start checks; the arena gets {checked.arena_nbytes // MiB:,} MiB"


def _print(found: list[Finding], console: Console) -> None:
    width = max(len(finding.what) for finding in found)
    for finding in found:
        mark = (finding.level.ljust(len("could be better")), _STYLES[finding.level])
        line = Text.assemble(f"{finding.what:<{width}}  ", mark, f"  {finding.found}")
        console.print(line, soft_wrap=True)
        if finding.mend:
            console.print(f"{'':<{width}}  -> {finding.mend}", soft_wrap=True)
    num_wrong = sum(finding.level == "wrong" for finding in found)
    console.print(f"{num_wrong} wrong" if num_wrong else "nothing is wrong")
