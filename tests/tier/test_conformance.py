"""Both kinds of tiers pass the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from afferent.conformance import CHECKS_OF_TIERS, NotConforming, check_tier
from afferent.errors import TierUnavailable
from afferent.tier.folder_tier import FolderTier
from afferent.tier.protocol import Found, Tier, Value
from afferent.tier.redis_tier import RedisTier
from afferent.tier.registry import open_tier
from tests.tier.servers import RedisServer


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def on_redis(redis_server: RedisServer) -> Iterator[Tier]:
    tier = open_tier(redis_server.url)
    assert isinstance(tier, RedisTier)
    yield tier
    tier.close()


@pytest.mark.parametrize("name", CHECKS_OF_TIERS)
def test_redis(name: str, on_redis: Tier) -> None:
    check_tier(name, on_redis)


@pytest.mark.parametrize("name", CHECKS_OF_TIERS)
@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_folders(name: str, scheme: str, tmp_path: Path) -> None:
    tier = open_tier(f"{scheme}://{tmp_path}")
    assert isinstance(tier, FolderTier)
    try:
        check_tier(name, tier)
    finally:
        tier.close()


def test_nothing_is_left_behind(redis_server: RedisServer, on_redis: Tier) -> None:
    """A deleted value leaves none of its parts."""
    before = set(redis_server.all_keys())
    for name in ("what_was_put_is_there_whole", "what_is_deleted_is_absent", "threads_share_it"):
        check_tier(name, on_redis)
    assert set(redis_server.all_keys()) <= before


class _ForgetsHeads(FolderTier):
    def exists_many(self, names: object, *, deadline_s: float) -> list[Found | None]:
        found = super().exists_many(names, deadline_s=deadline_s)  # type: ignore[arg-type]
        return [None if one is None else Found(b"", one.nbytes) for one in found]


class _LosesTheLast(FolderTier):
    def put_many(self, values: object, *, ttl_s: float, deadline_s: float) -> list[bool]:
        kept: list[Value] = list(values)[:-1]  # type: ignore[call-overload]
        return [*super().put_many(kept, ttl_s=ttl_s, deadline_s=deadline_s), True]


class _NeverFails(FolderTier):
    def exists_many(self, names: object, *, deadline_s: float) -> list[Found | None]:
        try:
            return super().exists_many(names, deadline_s=deadline_s)  # type: ignore[arg-type]
        except TierUnavailable:
            return []


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (_ForgetsHeads, "what_was_put_is_there_whole"),
        (_ForgetsHeads, "many_at_once"),
        (_LosesTheLast, "what_was_put_is_there_whole"),
        (_LosesTheLast, "parts_are_told_in_order"),
        (_NeverFails, "it_ends_by_the_deadline"),
    ],
)
def test_a_broken_promise_is_noticed(broken: type[FolderTier], name: str, tmp_path: Path) -> None:
    tier = broken(f"file://{tmp_path}")
    try:
        with pytest.raises(NotConforming):
            check_tier(name, tier)
    finally:
        tier.close()
