"""Trace of a request as a table for people, as ``--explain`` prints it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from afferent.telemetry.trace import Trace
from afferent.types import Span

_BAR_WIDTH = 26
COLOURS = {"frontend": "cyan", "store": "magenta", "preprocess": "yellow", "core": "blue"}


_BURST, _PER_S = 20, 4.0
"""Rate limit: to lay out a table takes milliseconds, and people read only a few a second."""


class Explainer:
    """Printer of traces, rate-limited to a readable number; it counts the omitted ones."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._allowed, self._at_s, self._num_left_out = float(_BURST), clock(), 0

    def show(self, trace: Trace, outcome: str) -> None:
        now_s = self._clock()
        self._allowed = min(_BURST, self._allowed + (now_s - self._at_s) * _PER_S)
        self._at_s = now_s
        if self._allowed < 1:
            self._num_left_out += 1
            return
        self._allowed -= 1
        if self._num_left_out:
            self._console.print(f"[dim]({self._num_left_out} requests are not shown)[/]\n")
            self._num_left_out = 0
        render(trace, outcome=outcome, console=self._console)


def render(trace: Trace, *, outcome: str, console: Console) -> None:
    """Print a trace for people: a line for each stage, with a bar that shows its time."""
    end_ns = max([time.monotonic_ns(), *(span.end_ns for span in trace.spans)])
    total_ns = max(end_ns - trace.start_ns, 1)
    copied = sum(span.copied_nbytes for span in trace.spans)
    table = Table(
        box=box.SIMPLE_HEAD,
        title=Text.assemble(
            (_shown(trace.request_id), "bold"),
            f"  {_shown(trace.what)}  {_shown(outcome)}  ",
            (f"{total_ns / 1e6:.1f} ms", "bold"),
        ),
        title_justify="left",
        title_style="",
        caption=Text("  ".join([*map(_shown, trace.items), f"{_size(copied)} copied in all"])),
        caption_justify="left",
        pad_edge=False,
    )
    table.add_column("process", no_wrap=True)
    table.add_column("stage", no_wrap=True)
    table.add_column("when", min_width=_BAR_WIDTH, no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True, min_width=7)
    table.add_column("copied", justify="right", no_wrap=True, min_width=8)
    table.add_column("", no_wrap=True, max_width=24)
    shown = ""
    for span in sorted(trace.spans, key=lambda span: (span.start_ns, span.end_ns)):
        process = f"{span.process} {span.pid}"
        colour = COLOURS.get(span.process.split("-")[0], "green")
        table.add_row(
            Text("" if process == shown else process, style=colour),
            Text(span.stage.replace("_", " ")),
            Text(_bar(span, trace.start_ns, total_ns), style=colour),
            f"{(span.end_ns - span.start_ns) / 1e6:.2f}",
            _size(span.copied_nbytes),
            Text(_shown(span.note), style="dim"),
        )
        shown = process
    console.print(table)


def _shown(text: str) -> str:
    """Return a client's text without characters that could control the terminal."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def _bar(span: Span, start_ns: int, total_ns: int) -> str:
    """Return the bar of ``span`` within the request, on a scale of `_BAR_WIDTH` characters."""
    first = (span.start_ns - start_ns) / total_ns * _BAR_WIDTH
    last = (span.end_ns - start_ns) / total_ns * _BAR_WIDTH
    left = min(max(int(first), 0), _BAR_WIDTH - 1)
    length = max(round(last - first), 0)
    drawn = "█" * min(length, _BAR_WIDTH - left) if length else "▏"
    return " " * left + drawn


def _size(nbytes: int) -> str:
    if nbytes == 0:
        return "0"
    if nbytes < 1000:
        return f"{nbytes} B"
    if nbytes < 1_000_000:
        return f"{nbytes / 1000:.1f} kB"
    return f"{nbytes / 1e6:.2f} MB"


def make_console(*, force_colour: bool = False) -> Console:
    """Return a console on stderr, as wide as the terminal, or 110 columns without one."""
    width = None if os.isatty(2) else 110
    return Console(stderr=True, width=width, force_terminal=force_colour or None, highlight=False)
