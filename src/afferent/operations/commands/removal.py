"""``afferent store evict`` and ``clear``: remove objects by hand."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from afferent.errors import ConfigError
from afferent.operations.commands import tables
from afferent.operations.commands.daemons import Running, Snapshot
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.protocol.items import MAX_ITEMS
from afferent.store.protocol.results import ObjectInfo
from afferent.types import ObjectKind

_KEY_DIGITS = 64


def evict(running: Running, store: DaemonStore, args: argparse.Namespace, console: Console) -> None:
    if bool(args.keys) == (args.kind is not None):
        raise ConfigError("say what to evict: either keys, or --kind")
    if args.keys:
        if args.nbytes is not None:
            raise ConfigError("--nbytes goes with --kind")
        _delete(store, args.keys, console)
        return
    kind = ObjectKind(args.kind)
    evicted = store.evict(kind, args.nbytes)
    console.print(f"{kind.value}: evicted {_amount(evicted.num_objects, evicted.nbytes)}")
    console.print(tables.left(store.stat(), [kind]))


def clear(running: Running, store: DaemonStore, args: argparse.Namespace, console: Console) -> None:
    for kind in ObjectKind:
        evicted = store.evict(kind)
        console.print(f"{kind.value}: evicted {_amount(evicted.num_objects, evicted.nbytes)}")
    snapshot = Snapshot.take(running, store)
    console.print(tables.left(snapshot.statistics, list(ObjectKind)))
    holders = [client for client in snapshot.clients if client.num_held]
    if holders:
        console.print(tables.clients(holders))


def _delete(store: DaemonStore, texts: Sequence[str], console: Console) -> None:
    """Delete objects by key, and print which of them are still pinned."""
    listed = store.list_objects(limit=MAX_ITEMS)
    known = {
        item.key: item
        for item in listed
        if item.key is not None and item.state != "pending_deletion"
    }
    keys = [resolve(text, list(known)) for text in dict.fromkeys(texts)]
    were_there = dict(zip(keys, store.delete(keys), strict=True))
    clients = {client.client: client for client in store.list_clients()}
    gone = [key for key, was_there in were_there.items() if was_there and not _pins(known.get(key))]
    nbytes = sum(known[key].handle.nbytes for key in gone if key in known)
    console.print(f"deleted {_amount(len(gone), nbytes)}")
    for key, was_there in were_there.items():
        item = known.get(key)
        name = key.hex()[: tables.KEY_DIGITS]
        if was_there and item is not None and item.pins:
            holders = ", ".join(tables.who(number, clients) for number in item.pins)
            console.print(
                f"{name} is no longer in the index; its {tables.size(item.handle.nbytes)} are "
                f"free once it is released by {holders}"
            )
        elif not was_there and item is not None and item.writer is not None:
            console.print(f"{name} stays: {tables.who(item.writer, clients)} writes it")
        elif not was_there:
            console.print(f"{name} is not there")


def resolve(text: str, keys: Sequence[bytes]) -> bytes:
    """Return the listed key that begins with ``text``; 64 digits need not be listed.

    Raises:
        ConfigError: It matches none or several, or is no hexadecimal number.
    """
    digits = text.lower()
    if not digits or set(digits) - set("0123456789abcdef") or len(digits) > _KEY_DIGITS:
        raise ConfigError(f"{text!r} is not a key: up to {_KEY_DIGITS} hexadecimal digits")
    if len(digits) == _KEY_DIGITS:
        return bytes.fromhex(digits)
    matching = [key for key in keys if key.hex().startswith(digits)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise ConfigError(f"{len(matching)} objects have a key that begins with {text!r}")
    among = f" among the {MAX_ITEMS} largest" if len(keys) >= MAX_ITEMS else ""
    raise ConfigError(f"no object{among} has a key that begins with {text!r}")


def _pins(item: ObjectInfo | None) -> list[int]:
    return item.pins if item is not None else []


def _amount(num_objects: int, nbytes: int) -> str:
    return f"{tables.count(num_objects, 'object')}, {tables.size(nbytes)}"
