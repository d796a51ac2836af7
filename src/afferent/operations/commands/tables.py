"""Tables of a store's statistics for people; they fit 80 columns."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from afferent.operations.commands import stats
from afferent.operations.commands.daemons import Snapshot
from afferent.store.protocol.results import ClientInfo, KindStatistics, ObjectInfo, Statistics
from afferent.types import ObjectKind

KEY_DIGITS = 12
"""Number of digits shown of a key: enough to identify it."""

_UNITS = ("KiB", "MiB", "GiB", "TiB")
_STORE = 0
"""The client id of the store itself."""


def make_console() -> Console:
    """Return a console on stdout, as wide as the terminal, or 110 columns without one."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 110
    return Console(highlight=False, markup=False, emoji=False, width=width)


def size(nbytes: int) -> str:
    """Format a size, such as ``12.5 MiB``."""
    if nbytes < 1024:
        return f"{nbytes} B" if nbytes else "0"
    power = min((nbytes.bit_length() - 1) // 10, len(_UNITS))
    value = nbytes / 1024**power
    return f"{value:,.{0 if value >= 99.95 else 1}f} {_UNITS[power - 1]}"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.1f} %"


def who(number: int, clients: Mapping[int, ClientInfo]) -> str:
    """Return a client's name and pid."""
    if number == _STORE:
        return "the store"
    client = clients.get(number)
    return f"{clean(client.name)} {client.pid}" if client else f"client {number}"


# stat


def stat(snapshot: Snapshot) -> RenderableType:
    statistics = snapshot.statistics
    parts: list[RenderableType] = [
        Text(str(snapshot.running)),
        kinds(statistics),
        _work(statistics),
    ]
    if snapshot.clients:
        parts.append(clients(snapshot.clients))
    return Group(*parts)


def kinds(statistics: Statistics) -> Table:
    """Return a table with a column for each kind of object."""
    rows: list[tuple[str, Callable[[KindStatistics], str]]] = [
        ("share", lambda kind: size(kind.capacity_nbytes)),
        ("in memory", lambda kind: size(kind.backed_nbytes)),
        ("used", lambda kind: size(kind.used_nbytes)),
        ("  held", lambda kind: size(kind.held_nbytes)),
        ("  evictable", lambda kind: size(stats.evictable_nbytes(kind))),
        ("free", lambda kind: size(stats.free_nbytes(kind))),
        ("  largest extent", lambda kind: size(kind.largest_free_nbytes)),
        ("  fragmentation", lambda kind: percent(stats.fragmentation(kind))),
        ("reserved", lambda kind: size(kind.reserved_nbytes)),
        ("objects", lambda kind: f"{kind.num_objects:,}"),
        ("  held", lambda kind: f"{kind.num_held:,}"),
        ("evicted so far", lambda kind: f"{kind.num_evicted:,}"),
    ]
    table = plain_table("", *statistics.kinds, numbers=set(statistics.kinds))
    for name, cell in rows:
        table.add_row(name, *map(cell, statistics.kinds.values()))
    return table


def _work(statistics: Statistics) -> Table:
    """Return the requests to the store, and its queues."""
    asked = (
        f"{count(statistics.num_hits, 'hit')}, {statistics.num_misses:,} missing, "
        f"{statistics.num_joined:,} in flight"
    )
    grid = Table.grid(padding=(0, 2))
    arena = (
        f"{size(statistics.capacity_nbytes)}, {size(statistics.backed_nbytes)} in memory, "
        f"{size(statistics.used_nbytes)} used"
    )
    grid.add_row("arena", arena)
    grid.add_row("hit rate", f"{percent(stats.hit_rate(statistics))}  ({asked})")
    jobs = f"{statistics.num_jobs_queued:,} queued, {statistics.num_jobs_running:,} running"
    grid.add_row("jobs", f"{jobs}, {count(statistics.num_workers, 'worker')}")
    grid.add_row("reservations", f"{statistics.num_reservations_queued:,} queued")
    grid.add_row("epoch", str(statistics.segment))
    return grid


def clients(infos: Sequence[ClientInfo]) -> Table:
    """Return connected clients and those with pins, the most pinned bytes first."""
    table = plain_table(
        "client", "pid", "state", "objects held", "held", "reserved",
        numbers={"pid", "objects held", "held", "reserved"},
    )  # fmt: skip
    _fold(table.columns[0])
    for info in sorted(infos, key=lambda info: (-info.held_nbytes, info.client)):
        table.add_row(
            clean(info.name),
            str(info.pid),
            "connected" if info.connected else Text("lost", style="red"),
            f"{info.num_held:,}",
            size(info.held_nbytes),
            size(info.reserved_nbytes),
        )
    return table


# ls


def objects(infos: Sequence[ObjectInfo], by_number: Mapping[int, ClientInfo]) -> Table:
    table = plain_table(
        "key", "kind", "state", "size", "generation", "held by", numbers={"size", "generation"}
    )
    _fold(table.columns[-1])
    for info in infos:
        holders = [who(number, by_number) for number in info.pins]
        if info.writer is not None:
            holders.insert(0, f"{who(info.writer, by_number)} (writes)")
        table.add_row(
            info.key.hex()[:KEY_DIGITS] if info.key is not None else "-",
            info.kind.value,
            info.state,
            size(info.handle.nbytes),
            str(info.handle.generation),
            ", ".join(holders) or "-",
        )
    return table


# evict and clear


def left(statistics: Statistics, kinds: Sequence[ObjectKind]) -> str:
    """Return the remaining objects of these kinds, and how many of them are pinned."""
    chosen = [statistics.kinds[kind] for kind in kinds]
    num_left = sum(kind.num_objects for kind in chosen)
    if not num_left:
        return "nothing is left"
    num_held = sum(kind.num_held for kind in chosen)
    used_nbytes = sum(kind.used_nbytes for kind in chosen)
    held_nbytes = sum(kind.held_nbytes for kind in chosen)
    return (
        f"left: {count(num_left, 'object')}, {size(used_nbytes)}; "
        f"of these {num_held:,} held, {size(held_nbytes)}"
    )


def marks() -> tuple[str, str, str]:
    """Return the marks of pinned, evictable and free, in ASCII if the output requires it."""
    can_draw = (sys.stdout.encoding or "").lower().startswith("utf")
    return ("█", "▒", "·") if can_draw else ("#", "=", ".")


def plain_table(*columns: str, numbers: set[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in numbers else "left",
            no_wrap=True,
            overflow="ellipsis",
        )
    return table


def _fold(column: Column) -> None:
    """Break its long cells into lines, so that no other column is cut for them."""
    column.no_wrap, column.overflow = False, "fold"


def clean(name: str) -> str:
    """Return a process's own name, without characters that could control a terminal."""
    return "".join(char if char.isprintable() else "?" for char in name)
