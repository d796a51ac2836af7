"""Cached results of URLs: their lifetime, their tenants, and requests that share a fetch."""

from __future__ import annotations

import asyncio

import pytest

from afferent.media.fetch import url_memory
from afferent.media.fetch.url_memory import UrlMemory, fresh_s
from afferent.types import Modality

DIGEST = bytes(range(32))


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def key(url: str, *, tenant: str = "", modality: Modality = Modality.IMAGE) -> bytes:
    return UrlMemory.key(url, tenant=tenant, modality=modality)


@pytest.mark.parametrize(
    ("cache_control", "age", "expected_s"),
    [
        ([], [], 10),
        ([b"public"], [], 10),
        ([b"max-age=300"], [], 300),
        ([b"Max-Age=300, public"], [b"100"], 200),
        ([b"max-age=60"], [b"100"], 0),
        ([b"max-age=31536000"], [], 3600),
        ([b"max-age=300"], [b"soon"], 300),
        ([b"max-age=300"], [b"10", b"20"], 280),
        ([b"public", b'max-age="7"'], [], 7),
        ([b"max-age=300, s-maxage=20"], [], 20),
        ([b"max-age=300, no-store"], [], 0),
        ([b"no-cache"], [], 0),
        ([b'private="set-cookie", max-age=5'], [], 0),
        ([b"max-age=0"], [], 0),
        ([b"max-age=-1"], [], 0),
        ([b"max-age=1e9"], [], 0),
        ([b"max-age"], [], 0),
        ([b"max-age=\xb2"], [], 0),
        ([b"max-age=" + b"9" * 400], [], 0),
    ],
)
def test_what_a_host_says_is_kept_to(
    cache_control: list[bytes], age: list[bytes], expected_s: float
) -> None:
    assert fresh_s(cache_control, age, default_s=10) == expected_s


def test_a_url_is_known_for_its_time_to_its_tenant() -> None:
    memory = UrlMemory(clock=(clock := Clock()))
    memory.remember(key("http://a/1", tenant="ours"), DIGEST, fresh_s=5)
    assert memory.digest(key("http://a/1", tenant="ours")) == DIGEST
    assert memory.digest(key("http://a/1", tenant="theirs")) is None
    assert memory.digest(key("http://a/2", tenant="ours")) is None
    assert memory.digest(key("http://a/1", tenant="ours", modality=Modality.VIDEO)) is None
    clock.now_s += 5
    assert memory.digest(key("http://a/1", tenant="ours")) is None


def test_nothing_is_known_for_longer_than_an_hour_nor_of_too_many() -> None:
    memory = UrlMemory(clock=(clock := Clock()))
    memory.remember(key("a"), DIGEST, fresh_s=1e9)
    memory.remember(key("b"), DIGEST, fresh_s=0)
    assert memory.digest(key("b")) is None
    clock.now_s += 3601
    assert memory.digest(key("a")) is None
    for number in range(url_memory._MAX_KNOWN + 5):
        memory.remember(key(str(number)), DIGEST, fresh_s=10)
    assert len(memory._known) == url_memory._MAX_KNOWN
    assert memory.digest(key("0")) is None
    assert memory.digest(key(str(url_memory._MAX_KNOWN))) == DIGEST


def test_who_comes_later_waits_for_who_fetches() -> None:
    asyncio.run(_later_waits())


async def _later_waits() -> None:
    memory = UrlMemory()
    first, nobody = memory.take_off([key("a"), key("b"), key("a")])
    assert nobody == []
    second, (others,) = memory.take_off([key("b"), key("c")])
    third, two = memory.take_off([key("c"), key("a")])
    assert len(two) == 2
    first.end()
    first.end()
    assert others.is_set()
    assert [each.is_set() for each in two] == [False, True]
    second.end()
    third.end()
    assert all(each.is_set() for each in two)
    assert memory._flights == {}
