"""``afferent tier``: list, verify and delete the objects of the tier that nodes share."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator

import msgspec
from msgspec import Struct
from rich.console import Console

from afferent.config import ServeConfig
from afferent.errors import ConfigError, FormatError
from afferent.operations.commands import tables
from afferent.tier.protocol import Health
from afferent.tier.registry import open_tier, without_secrets
from afferent.tier.sealed import Head, Sealer, check_key
from afferent.tier.vault import Vault, Wish
from afferent.types import ContentKey, ObjectKind

_TIMEOUT_S = 30.0
"""Timeout of one answer: for manual commands, a long wait is acceptable."""
_NUM_AT_ONCE = 100
"""Names in one request to delete them."""


class Contents(Struct, kw_only=True):
    """Output of ``afferent tier stat --json``.

    ``strangers`` are sealed with other secrets, or are no objects of Afferent.
    """

    tier: str
    about: str
    answered_in_ms: float
    used_nbytes: int | None
    max_nbytes: int | None
    num_objects: dict[str, int]
    nbytes: dict[str, int]
    num_strangers: int
    advice: tuple[str, ...]


def run(args: argparse.Namespace, settings: ServeConfig) -> int:
    """Run a command that `arguments.add_tier` has parsed; return the exit status.

    Raises:
        ConfigError: No tier is given.
        TierUnavailable: It does not answer.
    """
    if not settings.tier:
        raise ConfigError("--tier: say which one, as a URL such as redis://HOST, or AFFERENT_TIER")
    vault = Vault(open_tier(settings.tier), Sealer(settings.fleet_secret.encode()))
    console = tables.make_console()
    try:
        if args.verb == "stat":
            _stat(vault, settings, args, console)
            return 0
        if args.verb == "verify":
            return _verify(vault, console, max_nbytes=settings.tier_max_nbytes)
        _evict(vault, args, console)
        return 0
    finally:
        vault.close()


def _soon() -> float:
    return time.monotonic() + _TIMEOUT_S


def _stat(vault: Vault, settings: ServeConfig, args: argparse.Namespace, console: Console) -> None:
    start_s = time.monotonic()
    health = vault.tier.health(deadline_s=_soon())
    took_s = time.monotonic() - start_s
    contents = _contents(vault, health, tier=without_secrets(settings.tier), took_s=took_s)
    if args.json:
        console.out(msgspec.json.format(msgspec.json.encode(contents)).decode())
        return
    used = "" if health.used_nbytes is None else f", {tables.size(health.used_nbytes)} used"
    most = "" if health.max_nbytes is None else f" of {tables.size(health.max_nbytes)}"
    console.print(f"{contents.tier}: {health.about}{used}{most}")
    console.print(f"answered in {contents.answered_in_ms:.1f} ms")
    for kind, number in contents.num_objects.items():
        nbytes = tables.size(contents.nbytes[kind])
        console.print(f"{kind}: {tables.count(number, 'object')}, {nbytes}")
    if contents.num_strangers:
        strangers = tables.count(contents.num_strangers, "object")
        console.print(f"not sealed with this fleet's secret: {strangers}")
    for advice in health.advice:
        console.print(f"advice: {advice}")


def _contents(vault: Vault, health: Health, *, tier: str, took_s: float) -> Contents:
    numbers: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    num_strangers = 0
    for _, head in vault.heads(timeout_s=_TIMEOUT_S):
        if head is None:
            num_strangers += 1
        else:
            numbers[head.kind] += 1
            nbytes[head.kind] += head.nbytes
    return Contents(
        tier=tier,
        about=health.about,
        answered_in_ms=round(took_s * 1e3, 3),
        used_nbytes=health.used_nbytes,
        max_nbytes=health.max_nbytes,
        num_objects=dict(numbers),
        nbytes=dict(nbytes),
        num_strangers=num_strangers,
        advice=health.advice,
    )


def _verify(vault: Vault, console: Console, *, max_nbytes: int) -> int:
    """Verify all values up to ``max_nbytes``: a value is read into memory whole."""
    num_good = num_bad = num_strangers = num_longer = nbytes = 0
    for _, head in vault.heads(timeout_s=_TIMEOUT_S):
        if head is None:
            num_strangers += 1
            continue
        if head.nbytes > max_nbytes:
            num_longer += 1
            continue
        wish = Wish(head, memoryview(bytearray(head.nbytes)))
        (is_good,) = vault.fetch([wish], deadline_s=_soon())
        num_good += is_good
        num_bad += not is_good
        nbytes += head.nbytes if is_good else 0
    console.print(f"right: {tables.count(num_good, 'object')}, {tables.size(nbytes)}")
    console.print(f"wrong or not whole, deleted: {num_bad:,}")
    console.print(f"not sealed with this fleet's secret, left alone: {num_strangers:,}")
    if num_longer:
        console.print(f"longer than --tier-max-nbytes, not read: {num_longer:,}")
    return 1 if num_bad or num_longer else 0


def _evict(vault: Vault, args: argparse.Namespace, console: Console) -> None:
    names = list(_chosen(vault, args))
    number = sum(
        vault.tier.delete_many(names[start : start + _NUM_AT_ONCE], deadline_s=_soon())
        for start in range(0, len(names), _NUM_AT_ONCE)
    )
    console.print(f"deleted {tables.count(number, 'object')}")


def _chosen(vault: Vault, args: argparse.Namespace) -> Iterator[bytes]:
    if args.key:
        yield from (vault.name_of(_parsed(key)) for key in args.key)
        return
    kind = ObjectKind(args.kind) if args.kind else None
    for name, head in vault.heads(timeout_s=_TIMEOUT_S):
        if args.all or _is_of(head, kind):
            yield name


def _is_of(head: Head | None, kind: ObjectKind | None) -> bool:
    return head is not None and head.kind == kind


def _parsed(digits: str) -> ContentKey:
    try:
        return check_key(bytes.fromhex(digits))
    except (ValueError, FormatError) as error:
        raise ConfigError(f"--key {digits!r}: must be 64 hexadecimal digits") from error
