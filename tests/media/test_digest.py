"""Digests of many items: in the right order, and in a thread for large items."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from afferent import keys
from afferent.media.body.digest import Digester

SMALL = [bytes([n]) * 1000 for n in range(7)]
LARGE = [bytes([n]) * (700 << 10) for n in range(7)]


@pytest.fixture
def digester() -> Iterator[Digester]:
    digester = Digester()
    yield digester
    digester.close()


@pytest.mark.parametrize("media", [[], SMALL, LARGE, [memoryview(LARGE[0]), *SMALL]])
def test_each_has_its_own(media: list[bytes], digester: Digester) -> None:
    digests = asyncio.run(digester.digest_all(media))
    assert digests == [keys.digest(data) for data in media]


@pytest.mark.parametrize(
    ("media", "is_in_thread"),
    [
        (SMALL, False),
        (LARGE, True),
        ([b"\0" * ((1 << 20) - 1)], False),
        ([b"\0" * (1 << 20)], True),
    ],
)
def test_another_function_is_applied_to_each_in_a_thread_for_many_bytes(
    media: list[bytes], is_in_thread: bool, digester: Digester
) -> None:
    threads = []

    def head(data: bytes | memoryview) -> bytes:
        threads.append(threading.current_thread())
        return bytes(data[:3])

    assert asyncio.run(digester.apply(head, media)) == [data[:3] for data in media]
    assert {thread.name.startswith("digest") for thread in threads} == {is_in_thread}
    assert {thread is threading.main_thread() for thread in threads} == {not is_in_thread}
