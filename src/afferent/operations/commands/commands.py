"""``afferent store``: find the requested daemon, and run the command."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import msgspec
from rich.console import Console

from afferent.operations.commands import daemons, removal, standalone, tables
from afferent.operations.commands.daemons import Running, Snapshot
from afferent.operations.commands.stats import object_document, stat_document
from afferent.store.client.daemon_store import DaemonStore
from afferent.types import ObjectKind

_REMOVING = ("evict", "clear")

Command = Callable[[Running, DaemonStore, argparse.Namespace, Console], None]


def run(args: argparse.Namespace) -> int:
    """Run a command that `arguments.add_store` has parsed; return the exit status.

    Raises:
        StoreUnavailable: No daemon runs, or it ends meanwhile.
        ConfigError: The requested daemon or object is ambiguous.
    """
    console = tables.make_console()
    if args.verb == "run":
        standalone.run(args, console)
        return 0
    commands: dict[str, Command] = {
        "stat": _stat,
        "ls": _list,
        "evict": removal.evict,
        "clear": removal.clear,
    }
    running = daemons.choose(daemons.find(), args.address)
    if args.verb in _REMOVING and args.address is None:
        daemons.confirm(running, f"afferent store {args.verb}")
    with running.connect() as store:
        commands[args.verb](running, store, args, console)
    return 0


def _stat(running: Running, store: DaemonStore, args: argparse.Namespace, console: Console) -> None:
    snapshot = Snapshot.take(running, store)
    if args.json:
        _print_json(stat_document(snapshot), console)
    else:
        console.print(tables.stat(snapshot))


def _list(running: Running, store: DaemonStore, args: argparse.Namespace, console: Console) -> None:
    kind = ObjectKind(args.kind) if args.kind is not None else None
    found = store.list_objects(kind, limit=args.limit)
    clients = {client.client: client for client in store.list_clients()}
    if args.json:
        _print_json([object_document(item, clients) for item in found], console)
        return
    statistics = store.stat()
    num_objects = statistics.kinds[kind].num_objects if kind else statistics.num_objects
    if found:
        console.print(tables.objects(found, clients))
    only = f", {kind} only" if kind else ""
    console.print(f"{len(found):,} of {tables.count(num_objects, 'object')}{only}")


def _print_json(document: object, console: Console) -> None:
    # `print` would wrap it at the console's width
    console.out(msgspec.json.format(msgspec.json.encode(document)).decode())
