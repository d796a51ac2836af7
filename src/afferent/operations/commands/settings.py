"""``afferent config``: show the settings, and check them as a start does."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from afferent.config import Loaded, Setting, describe
from afferent.errors import AfferentError
from afferent.operations.supervisor.checks import Checked, exposure, silent_tier
from afferent.operations.supervisor.checks import check as look
from afferent.operations.supervisor.preparing import rehearse
from afferent.types import MiB


def show(loaded: Loaded, known: Mapping[str, Setting], *, as_json: bool) -> None:
    """Print every setting with its value and origin.

    JSON adds the value that a server would choose, if it differs, and the error of a refused start.
    """
    values = dict(loaded.values())
    if as_json:
        print_json(_document(loaded, known, values))
        return
    width = max(map(len, known))
    for one in describe.by_group(known):
        print(f"{one.key:<{width}} {one.show(values[one.key]):<16} {loaded.sources[one.key]}")


def check(loaded: Loaded, known: Mapping[str, Setting], *, as_json: bool) -> None:
    """Run all checks of a start before its first process.

    Raises:
        ConfigError: These settings can't be served.
        UnsupportedModel: This model can't be served.
    """
    checked, settings = rehearse(loaded, _say), loaded.config
    warnings = [warning for warning in (exposure(settings), silent_tier(settings)) if warning]
    if as_json:
        print_json({**_resolved(checked), "warnings": warnings})
        return
    where = f"{settings.host}:{settings.port}, with an arena of {checked.arena_nbytes // MiB:,} MiB"
    print(f"these settings can be served: {checked.model_name} on {where}")
    for warning in warnings:
        print(f"warning: {warning}")


def print_json(document: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(document)).decode())


def _say(who: str, what: str) -> None:
    print(f"{who}: {what}", file=sys.stderr)


def _document(
    loaded: Loaded, known: Mapping[str, Setting], values: Mapping[str, object]
) -> dict[str, Any]:
    refused, resolved = None, dict[str, object]()
    try:
        resolved = _resolved(look(loaded))
    except AfferentError as error:
        refused = error.message
    settings: dict[str, dict[str, Any]] = {}
    for one in describe.by_group(known):
        value = values[one.key]
        shown = one.show(value) if one.is_secret and value else value
        settings[one.key] = {"value": shown, "source": loaded.sources[one.key]}
        if one.key in resolved:
            settings[one.key]["resolved"] = resolved[one.key]
    return {"settings": settings, "refused": refused}


def _resolved(checked: Checked) -> dict[str, object]:
    """Return the values that a server chooses for settings that leave a choice."""
    settings = checked.config
    return {
        "model": str(checked.folder),
        "served_model_name": settings.served_model_name or (checked.model_name,),
        "engine": checked.engine.name,
        "arena_nbytes": checked.arena_nbytes,
        "frontends": settings.frontends,
        "preprocess_workers": settings.preprocess_workers,
        "preprocess_memory_nbytes": settings.preprocess_memory_nbytes,
    }
