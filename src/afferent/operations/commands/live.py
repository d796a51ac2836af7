"""``afferent store top``: the activity of a store."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.live import Live

from afferent.operations.commands import tables
from afferent.operations.commands.daemons import Running
from afferent.operations.commands.snapshot import Snapshot
from afferent.operations.commands.stats import Rates
from afferent.store.client.daemon_store import DaemonStore


def top(running: Running, store: DaemonStore, args: argparse.Namespace, console: Console) -> None:
    """Show frames until Ctrl-C, or a given number; without a terminal, one."""
    num_frames = 1 if args.once or not (args.count or console.is_terminal) else args.count
    frames = itertools.islice(_frames(running, store, args.interval), num_frames)
    try:
        if args.once or not console.is_terminal:
            for frame in frames:
                console.print(frame)
        else:
            with Live(console=console, auto_refresh=False, redirect_stdout=False) as live:
                for frame in frames:
                    live.update(frame, refresh=True)
    except KeyboardInterrupt:  # the usual end
        return


def _frames(running: Running, store: DaemonStore, interval_s: float) -> Iterator[RenderableType]:
    """Yield a frame after each interval, without end."""
    before = Snapshot.take(running, store)
    while True:
        time.sleep(interval_s)
        after = Snapshot.take(running, store)
        yield tables.top(after, Rates.between(before, after))
        before = after
