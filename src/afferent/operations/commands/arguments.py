"""Arguments of ``afferent store``, ``tier``, ``top`` and ``restart``; imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from afferent.config import parse_nbytes
from afferent.errors import ConfigError
from afferent.store.protocol.items import MAX_ITEMS
from afferent.types import GiB, Modality, ObjectKind

_KINDS = [kind.value for kind in ObjectKind]
_TIERED = [ObjectKind.FEATURES.value, ObjectKind.EMBEDDINGS.value]


def add_store(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``store`` and all below it."""
    store = commands.add_parser(
        "store",
        help="look into a running store, or make room in it",
        description="Look into the store of a running server, or make room in it.",
    )
    verbs = store.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    _add_questions(verbs)
    _add_changes(verbs)
    _add_run(verbs)


def add_top(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    top = commands.add_parser(
        "top",
        help="what a running server is doing, as it goes on",
        description="What a server is doing: the way of the data, the arena, the gate, requests "
        "with their stages. q ends it. Without a terminal: one frame.",
    )
    _add_pid(top)
    top.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="SECONDS",
        help="from one frame to the next (default: 1)",
    )
    frames = top.add_mutually_exclusive_group()
    frames.add_argument("--count", type=_positive, metavar="N", help="end after so many frames")
    frames.add_argument("--once", action="store_true", help="print one frame, after one interval")


def add_tier(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``tier`` and all below it."""
    tier = commands.add_parser(
        "tier",
        help="look into a tier that nodes share, check it, or remove what is in it",
        description="Look into a tier that nodes share. Which one, and with what secret, say the "
        "settings of afferent serve: AFFERENT_TIER and AFFERENT_FLEET_SECRET, or --config.",
    )
    verbs = tier.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    stat = verbs.add_parser("stat", help="whether it answers, how full it is, what is in it")
    verify = verbs.add_parser(
        "verify",
        help="read all that is in it, and check every byte",
        description="Read all that is in it and check every byte. What is not as it was sealed is "
        "deleted, and counted; then the exit status is 1.",
    )
    evict = verbs.add_parser(
        "evict",
        help="remove objects: by key, by kind, or all",
        description="Remove what this fleet has put there: what has other secrets is not touched "
        "but by --all.",
    )
    for verb in (stat, verify, evict):
        verb.add_argument("--tier", metavar="URL", help="which one")
        verb.add_argument("--config", type=Path, metavar="FILE", help="settings of afferent serve")
    _add_json(stat)
    what = evict.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--key", action="append", metavar="KEY", help="64 hexadecimal digits, as logs have them"
    )
    what.add_argument("--kind", choices=_TIERED, help="all of this kind")
    what.add_argument("--all", action="store_true", help="everything, strangers included")


def add_restart(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    restart = commands.add_parser(
        "restart",
        help="restart a running server's frontends one by one, or its engine",
        description="frontends: one after the other; each is replaced before it leaves, and no "
        "request is lost. engine: nobody is let in (503 with Retry-After) until those who are "
        "inside have their answers and the engine is there again. The exit status is 1 if it came "
        "to nothing.",
    )
    restart.add_argument("what", choices=["frontends", "engine"])
    _add_pid(restart)


def add_features(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    features = commands.add_parser(
        "features",
        help="make the features of files, for batch jobs",
        description="Make the features of images, videos or audio clips, as the server makes them, "
        "and write them into one safetensors file, under FILE/NAME, or into the store of a running "
        "server of the same model. The exit status is 1 if a file failed; the others are written.",
    )
    features.add_argument(
        "model", metavar="MODEL", help="a model's folder, its name on a hub, or a built-in model"
    )
    features.add_argument(
        "files", nargs="+", metavar="FILE", help="files, or folders with nothing but such files"
    )
    features.add_argument(
        "--out",
        required=True,
        metavar="NAME.safetensors|store",
        help="a new file, or 'store' for the store of a running server",
    )
    features.add_argument(
        "--form",
        choices=["compact", "hf"],
        default="compact",
        help="compact: pixels as bytes (default); hf: floats as the model's own processor makes "
        "them, to the last bit",
    )
    features.add_argument(
        "--backend",
        choices=["torchvision", "pil"],
        help="the processor's backend whose results are reproduced (default: as transformers "
        "chooses here)",
    )
    features.add_argument(
        "--modality",
        choices=[each.value for each in Modality],
        help="of all files (default: by their first bytes)",
    )
    features.add_argument(
        "--workers", type=_positive, metavar="N", help="worker processes (default: one a core)"
    )
    features.add_argument(
        "--here",
        action="store_true",
        help="decode in this process, unconfined: only for files that you trust",
    )
    features.add_argument(
        "--revision", default="", metavar="NAME", help="branch, tag or commit of a model on a hub"
    )
    _add_address(features)


def _add_pid(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pid", type=int, metavar="PID", help="of which server (its supervisor), if several run"
    )


def _add_questions(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    stat = verbs.add_parser("stat", help="how full it is, how often it helps, who holds what")
    _add_address(stat)
    _add_json(stat)
    listing = verbs.add_parser("ls", help="the largest objects, and who holds them")
    _add_address(listing)
    _add_json(listing)
    listing.add_argument("--kind", choices=_KINDS, help="only objects of this kind")
    listing.add_argument(
        "--limit", type=_limit, default=20, metavar="N", help="how many (default: 20)"
    )


def _add_changes(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    evict = verbs.add_parser(
        "evict",
        help="remove objects, by key or by kind",
        description="Remove objects: those of the given keys, or the least recently used of a "
        "kind. What somebody holds keeps its place until it is let go. Of which store is said "
        "by --address, or confirmed.",
    )
    _add_address(evict)
    evict.add_argument(
        "keys", nargs="*", metavar="KEY", help="a key, or its first digits, as 'ls' shows them"
    )
    evict.add_argument("--kind", choices=_KINDS, help="the least recently used of this kind")
    evict.add_argument(
        "--nbytes", type=_nbytes, metavar="BYTES", help="no more than it takes for these; else all"
    )
    clear = verbs.add_parser("clear", help="remove everything that nobody holds")
    _add_address(clear)


def _add_run(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = verbs.add_parser(
        "run",
        help="a store without a server, for programs of your own",
        description="Run a store for programs of your own, until Ctrl-C or SIGTERM.",
    )
    run.add_argument(
        "--arena-nbytes",
        type=_nbytes,
        default=GiB,
        metavar="BYTES",
        help="shared memory (default: 1GiB)",
    )
    run.add_argument(
        "--preallocate-arena",
        action="store_true",
        help="have all of it take its memory now, and not as it is filled",
    )
    for kind in _KINDS:
        default = "what the others leave" if kind == ObjectKind.FEATURES else "0"
        run.add_argument(
            f"--{kind}-share",
            type=_share,
            metavar="SHARE",
            help=f"part of it for {kind} (default: {default})",
        )


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        metavar="NAME",
        help="which store, where several run: its address, or the first digits of it",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


# Value parsers. argparse turns their ValueErrors into usage errors.


def _nbytes(text: str) -> int:
    try:
        nbytes = parse_nbytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from error
    if not 0 < nbytes <= 1 << 48:
        raise argparse.ArgumentTypeError(f"{text} is no size to ask for")
    return nbytes


def _limit(text: str) -> int:
    limit = _positive(text)
    if limit > MAX_ITEMS:
        raise argparse.ArgumentTypeError(f"at most {MAX_ITEMS} objects are listed")
    return limit


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def _seconds(text: str) -> float:
    if not 0.01 <= (seconds := _number(text)) <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.01 and 3600 seconds")
    return seconds


def _share(text: str) -> float:
    if not 0 <= (share := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return share


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
