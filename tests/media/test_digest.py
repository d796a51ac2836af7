"""Digests of many items: in the right order, and on threads for large items."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from afferent import keys
from afferent.media.body import digest
from afferent.media.body.digest import Digester, stripe

SMALL = [bytes([n]) * 1000 for n in range(7)]
LARGE = [bytes([n]) * (700 << 10) for n in range(7)]


@pytest.mark.parametrize("media", [[], SMALL, LARGE, [memoryview(LARGE[0]), *SMALL]])
@pytest.mark.parametrize("num_workers", [0, 1, 2, 16])
def test_each_has_its_own(media: list[bytes], num_workers: int) -> None:
    digester = Digester(num_workers)
    try:
        digests = asyncio.run(digester.digest_all(media))
    finally:
        digester.close()
    assert digests == [keys.digest(data) for data in media]


def test_another_function_is_applied_to_each() -> None:
    digester = Digester(2)
    try:
        found = asyncio.run(digester.apply(lambda data: bytes(data[:3]), LARGE))
    finally:
        digester.close()
    assert found == [data[:3] for data in LARGE]


@pytest.mark.parametrize(
    ("media", "num_workers", "num_threads"),
    [
        (SMALL, 4, 0),
        (LARGE, 0, 0),
        (LARGE, 1, 1),
        (LARGE, 2, 2),
        (LARGE, 16, 4),  # almost 5 MiB
        ([b"\0" * ((1 << 20) - 1)], 2, 0),
        ([b"\0" * (1 << 20)], 2, 1),
    ],
)
def test_threads_are_for_what_is_worth_them(
    media: list[bytes], num_workers: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = []

    def each(work: Callable[[bytes], bytes], part: list[bytes]) -> list[bytes]:
        parts.append(threading.current_thread().name)
        return [work(data) for data in part]

    monkeypatch.setattr(digest, "_each", each)
    digester = Digester(num_workers)
    try:
        asyncio.run(digester.digest_all(media))
    finally:
        digester.close()
    assert len(parts) == num_threads
    assert all(name.startswith("digest") for name in parts)


def test_items_are_dealt_out_in_turn() -> None:
    items = [b"a", b"b", b"c", b"d", b"e"]
    assert stripe(items, 2) == [[b"a", b"c", b"e"], [b"b", b"d"]]
    assert stripe(items, 9) == [[each] for each in items]
    assert stripe([], 3) == []
