"""Help texts of the commands."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping

from afferent.config.declaring import Group, Setting
from afferent.errors import ConfigError

ALL = "all"

_FLAG_WIDTH = 34
"""Longest flag whose text begins on the same line."""

Entry = tuple[str, str]
"""A flag with its value, and its text."""


FILE_FLAG: Entry = ("--config FILE", "TOML file with settings and tenants")


def common(known: Mapping[str, Setting], *, command: str, width: int) -> str:
    """Return the help that fits on a screen: the common settings, and the pages of the others."""
    lines = ["Common settings (and their defaults):"]
    lines += _rows([*_entries(known, Group.COMMON), FILE_FLAG], width)
    lines += ["", f"More: {command} --help GROUP, or --help all."]
    for group in Group:
        if group is not Group.COMMON and (chosen := in_group(known, group)):
            lines.append(f"  {group:<14} {group.about} ({len(chosen)})")
    lines.append(f"An engine's own: {command} --engine NAME --help engine.")
    return "\n".join(lines)


def group_page(known: Mapping[str, Setting], name: str, *, width: int) -> str:
    """Return the help of one group, or of all.

    Raises:
        ConfigError: There is no such group.
    """
    groups = {str(group): group for group in Group}
    if name not in groups and name != ALL:
        raise ConfigError(
            f"there is no group {name!r} of settings; there are {', '.join(groups)} and {ALL}"
        )
    chosen = list(Group) if name == ALL else [groups[name]]
    parts = [
        "\n".join([f"{group.capitalize()}: {group.about}", *_rows(entries, width)])
        for group in chosen
        if (entries := list(_entries(known, group)))
    ]
    return "\n\n".join(parts)


def in_group(known: Mapping[str, Setting], group: Group) -> list[Setting]:
    return [one for one in known.values() if one.group is group]


def by_group(known: Mapping[str, Setting]) -> list[Setting]:
    return [one for group in Group for one in in_group(known, group)]


def _entries(known: Mapping[str, Setting], group: Group) -> Iterator[Entry]:
    for one in in_group(known, group):
        if not one.is_table:
            yield _usage(one), one.text + _default(one)


def _usage(one: Setting) -> str:
    return one.flag if one.is_switch or not one.flag.startswith("--") else f"{one.flag} {one.unit}"


def _default(one: Setting) -> str:
    """Return the default in brackets; empty if the text explains a default of zero."""
    if one.default is False or one.default in ("", ()) or f"; {one.default}: " in one.text:
        return ""
    return f" ({one.show(one.default)})"


def _rows(entries: Iterable[Entry], width: int) -> list[str]:
    entries = list(entries)
    first = max(len(usage) for usage, _ in entries if len(usage) <= _FLAG_WIDTH)
    rows = []
    for usage, text in entries:
        lines = textwrap.wrap(text, width - first - 4, break_on_hyphens=False)
        if len(usage) > first:
            rows.append(f"  {usage}")
            usage = ""
        for line in lines:
            rows.append(f"  {usage:<{first}}  {line}")
            usage = ""
    return rows
