"""``afferent store run``: a store without a server."""

from __future__ import annotations

import argparse
import signal
import threading

from rich.console import Console

from afferent.errors import StoreUnavailable
from afferent.operations.commands import daemons, tables
from afferent.runtime import logs, shortage
from afferent.store.daemon.server import StoreServer
from afferent.types import ObjectKind

_LOOK_AGAIN_S = 1.0


def run(args: argparse.Namespace, console: Console) -> None:
    """Run a daemon until SIGINT, SIGTERM or SIGHUP.

    Raises:
        ConfigError: There is too little memory, the shares exceed 1, or too few files may be open.
        StoreUnavailable: The daemon does not start; its log gives the reason.
    """
    shortage.check_files()
    given = {kind: getattr(args, f"{kind}_share") for kind in ObjectKind}
    shares = {kind: share for kind, share in given.items() if share is not None}
    shares.setdefault(ObjectKind.FEATURES, max(1.0 - sum(shares.values()), 0.0))
    logs.configure("store run", level="warning", format="text")
    stop = threading.Event()
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signals.append(signal.SIGHUP)
    for signum in signals:
        signal.signal(signum, lambda *_: stop.set())
    with StoreServer(
        args.arena_nbytes, shares=shares, preallocate=args.preallocate_arena
    ) as server:
        _announce(server, args.arena_nbytes, shares, console)
        while not stop.wait(_LOOK_AGAIN_S):
            if server.has_ended:
                raise StoreUnavailable("the store daemon does not start again; its log says why")
    console.print("The store has ended.")


def _announce(
    server: StoreServer, arena_nbytes: int, shares: dict[ObjectKind, float], console: Console
) -> None:
    parts = ", ".join(f"{tables.percent(share)} {kind.value}" for kind, share in shares.items())
    lines = (
        f"A store of {tables.size(arena_nbytes)} ({parts}), pid {server.pid}",
        f"at {server.address}",
        "",
        "In your program:",
        "",
        "    from afferent import DaemonStore",
        "",
        f'    ADDRESS = "{server.address}"',
        '    store = DaemonStore(ADDRESS, name="mine", writable=True)',
        "",
        f"To look into it: afferent store stat --address {daemons.short(server.address)}",
        "Ctrl-C ends it.",
    )
    console.out("\n".join(lines))
    console.file.flush()  # a reader of a pipe waits for the address
