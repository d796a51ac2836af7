"""Frame of ``afferent top``: a server's view, fitted to the terminal's size. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from afferent.operations.commands.tables import clean, marks, plain_table, size
from afferent.operations.live_page.savings import Savings
from afferent.operations.live_page.view import Kind, Request, Stage, View
from afferent.operations.live_page.way import Figure, Station, Unit
from afferent.telemetry.explain import COLOURS

_BAR_WIDTH, _SHORT_BAR_WIDTH = 24, 12
_WIDE = 96
"""Least number of columns for the longer bars and a fourth figure."""
_NAME_WIDTH = 13
_LEAST_WIDTHS = (10, 16, None, None, 7)
"""Least widths of the columns of requests."""
_STATES = {"idle": "dim", "busy": "", "waiting": "yellow"}
_TABLE_LINES = 4
"""Lines of a table in addition to its rows."""
_LEAST_REQUESTS = 3


def frame(view: View, *, width: int, num_lines: int | None = None) -> RenderableType:
    """Return the whole frame, with as many requests as fit.

    Args:
        num_lines: Lines of the terminal; ``None`` if it scrolls.
    """
    is_wide = width >= _WIDE
    bar_width = _BAR_WIDTH if is_wide else _SHORT_BAR_WIDTH
    kinds = _kinds(view.kinds, bar_width)
    way = _way([*view.way, _saved(view.savings)], 4 if is_wide else 3)
    parts: list[RenderableType] = [_headline(view), way, kinds, _legend()]
    num_taken = 3 + len(view.way) + len(view.kinds) + 2 * _TABLE_LINES
    if len(view.gate.tenants) > 1:
        parts.append(_tenants(view))
        num_taken += len(view.gate.tenants) + _TABLE_LINES
    room = len(view.running) + len(view.ended) if num_lines is None else num_lines - num_taken
    if requests := [*view.running, *view.ended][: max(room, _LEAST_REQUESTS)]:
        parts.append(_requests(requests, bar_width))
    return Group(*parts)


def show(value: float | None, unit: Unit = "") -> str:
    """Format a figure for people."""
    if value is None:
        return "-"
    match unit:
        case "B":
            return size(round(value))
        case "B/s":
            return f"{size(round(value))}/s"
        case "%":
            return f"{100 * value:.{1 if value < 0.995 else 0}f} %"
        case "s" if value < 1:
            return f"{1e3 * value:.{1 if value < 0.01 else 0}f} ms"
        case "s":
            return f"{value:.{2 if value < 10 else 1}f} s"
        case "/s":
            return f"{value:,.{1 if 0 < value < 10 else 0}f} /s"
        case _:
            return f"{value:,.0f}"


def _headline(view: View) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("Afferent", style="bold")
    line.append(f"  {clean(view.model)}   ")
    frontends = f"{view.num_frontends} frontend" + ("" if view.num_frontends == 1 else "s")
    line.append(f"{frontends}, {view.num_running:,} requests in flight, {_waiting(view)}")
    if view.problem:
        line.append(f"   {view.problem}", style="red")
    return line


def _waiting(view: View) -> str:
    gate = view.gate
    return f"{gate.num_waiting_for_room + gate.num_waiting_for_permits:,} waiting at the gate"


def _saved(savings: Savings) -> Station:
    figures = [
        Figure("work", savings.saved_s, "s"),
        Figure("copies", savings.copied_nbytes, "B"),
        Figure("found", savings.hit_rate, "%"),
    ]
    return Station(name="Saved", state="busy", figures=figures)


def _way(way: Sequence[Station], num_figures: int) -> Table:
    """Return a line for each station."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, min_width=_NAME_WIDTH)
    for _ in range(num_figures):
        grid.add_column(no_wrap=True)
    for station in way:
        figures = []
        for index, figure in enumerate(station.figures[:num_figures]):
            text = Text(show(figure.value, figure.unit), style="bold" if index == 0 else "")
            figures.append(text.append(f" {figure.label}", style="dim not bold"))
        grid.add_row(Text(station.name, style=_STATES[station.state]), *figures)
    return grid


def _kinds(kinds: Sequence[Kind], bar_width: int) -> Table:
    numbers = {"pinned", "evictable", "share", "reserved", "evicted"}
    table = plain_table(
        *("arena", "", "pinned", "evictable", "share", "reserved", "evicted"), numbers=numbers
    )
    for kind in kinds:
        table.add_row(
            kind.kind,
            _bar(kind, bar_width),
            size(kind.pinned_nbytes),
            size(kind.evictable_nbytes),
            size(kind.capacity_nbytes),
            size(kind.reserved_nbytes),
            show(kind.evicted_per_s, "/s"),
        )
    return table


def _bar(kind: Kind, width: int) -> str:
    scale = width / max(kind.capacity_nbytes, 1)
    pinned = ceil(kind.pinned_nbytes * scale)
    used = ceil((kind.pinned_nbytes + kind.evictable_nbytes) * scale)
    parts = zip(marks(), (pinned, used - pinned, width - used), strict=True)
    return "".join(mark * width for mark, width in parts)


def _legend() -> Text:
    pinned, evictable, free = marks()
    return Text(f"{pinned} pinned   {evictable} evictable   {free} free", style="dim")


def _tenants(view: View) -> Table:
    numbers = {"share", "in flight", "waiting", "reserved"}
    table = plain_table("tenant", *("share", "in flight", "waiting", "reserved"), numbers=numbers)
    for tenant in view.gate.tenants:
        table.add_row(
            clean(tenant.name) or "everybody else",
            show(tenant.share, "%"),
            show(tenant.num_running),
            show(tenant.num_waiting),
            size(tenant.reserved_nbytes),
        )
    return table


def _requests(requests: Sequence[Request], bar_width: int) -> Table:
    table = plain_table("request", "", "items", "stages", "took", numbers={"took"})
    for column, least in zip(table.columns, _LEAST_WIDTHS, strict=True):
        column.min_width = least  # if columns are too narrow, items are cut
    for request in requests:
        style = "cyan" if not request.outcome else "" if request.outcome == "ok" else "red"
        table.add_row(
            Text(request.outcome.replace("_", " ") or f"in {request.where}", style=style),
            clean(request.what.removeprefix("POST /v1/")),
            clean(", ".join(request.items) or request.media),
            _waterfall(request, bar_width),
            show(request.seconds, "s"),
        )
    return table


def _waterfall(request: Request, width: int) -> Text:
    """Return a line; each character shows the running stage that began last by that time."""
    total_s = max([request.seconds, 1e-6, *(s.start_s + s.seconds for s in request.stages)])
    line = Text(no_wrap=True)
    for index in range(width):
        low_s, high_s = (edge / width * total_s for edge in (index, index + 1))
        found = [s for s in request.stages if s.start_s < high_s and s.start_s + s.seconds > low_s]
        line.append(*_mark(found))
    return line


def _mark(stages: Sequence[Stage]) -> tuple[str, str]:
    if not stages:
        return " ", ""
    latest = max(stages, key=lambda stage: stage.start_s)
    return marks()[0], COLOURS.get(latest.process.split("-")[0].split(" ")[0], "green")
