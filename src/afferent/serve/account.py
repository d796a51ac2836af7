"""The account of a request: what each stage took, in which process, and what it copied."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from afferent.types import Span, span_since

_BAR_WIDTH = 26
_COLOURS = {"frontend": "cyan", "store": "magenta", "preprocess": "yellow", "core": "blue"}


@dataclass(slots=True)
class Account:
    """Spans of one request, of every process that worked on it."""

    request_id: str
    what: str
    start_ns: int = field(default_factory=time.monotonic_ns)
    spans: list[Span] = field(default_factory=list)
    items: list[str] = field(default_factory=list)
    media: str = "unknown"
    """The modality of the request's media: one of `afferent.metrics.MEDIA`."""
    where: str = "body"
    """Where the request is: one of `afferent.metrics.PLACES`."""

    def stage(self, start_ns: int, name: str, *, copied_nbytes: int = 0, note: str = "") -> None:
        """Record a stage of this process, from ``start_ns`` to now."""
        self.spans.append(
            span_since(start_ns, "frontend", name, copied_nbytes=copied_nbytes, note=note)
        )

    @contextlib.contextmanager
    def at(self, where: str) -> Iterator[None]:
        """The request is elsewhere for a while, or for good if it fails there."""
        before, self.where = self.where, where
        yield
        self.where = before

    def add(self, spans: Sequence[Span]) -> None:
        self.spans += spans


def render(account: Account, *, outcome: str, console: Console) -> None:
    """Print the account for a person: a line a stage, a bar for when it ran."""
    end_ns = max([time.monotonic_ns(), *(span.end_ns for span in account.spans)])
    total_ns = max(end_ns - account.start_ns, 1)
    copied = sum(span.copied_nbytes for span in account.spans)
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"[bold]{account.request_id}[/]  {account.what}  {outcome}  "
        f"[bold]{total_ns / 1e6:.1f} ms[/]",
        title_justify="left",
        title_style="",
        caption="  ".join([*account.items, f"{_size(copied)} copied in all"]),
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
    for span in sorted(account.spans, key=lambda span: (span.start_ns, span.end_ns)):
        process = f"{span.process} {span.pid}"
        colour = _COLOURS.get(span.process.split("-")[0], "green")
        table.add_row(
            Text("" if process == shown else process, style=colour),
            span.stage,
            Text(_bar(span, account.start_ns, total_ns), style=colour),
            f"{(span.end_ns - span.start_ns) / 1e6:.2f}",
            _size(span.copied_nbytes),
            Text(span.note, style="dim"),
        )
        shown = process
    console.print(table)


def _bar(span: Span, start_ns: int, total_ns: int) -> str:
    """``span`` within the request, on a scale of `_BAR_WIDTH` characters."""
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
    """Standard error, as wide as the terminal, or 110 columns where there is none."""
    width = None if os.isatty(2) else 110
    return Console(stderr=True, width=width, force_terminal=force_colour or None, highlight=False)
