"""The soak test detects memory growth and restarted processes."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import psutil
import pytest

from tests.end_to_end import soak

MB = 1_000_000


@pytest.mark.parametrize(
    ("nbytes", "is_flat"),
    [
        ([50 * MB] * 20, True),
        ([50 * MB + (index % 2) * 3 * MB for index in range(20)], True),
        ([50 * MB] * 19 + [90 * MB], True),  # a single peak is not growth
        ([50 * MB + index * MB for index in range(20)], False),
        ([50 * MB] * 10 + [55 * MB] * 10, False),
    ],
)
def test_growth_is_flat_within_4_mb(nbytes: Sequence[int], is_flat: bool) -> None:
    found = {1: soak.Growth("frontend", list(nbytes))}
    assert found[1].is_flat == is_flat
    assert soak.failures(found, 20) == ([] if is_flat else ["frontend is not flat"])
    assert ("not flat" in soak.table(found)) != is_flat


def test_process_that_was_started_again_fails() -> None:
    found = {1: soak.Growth("frontend", [MB] * 5), 2: soak.Growth("frontend", [MB] * 4)}
    assert soak.failures(found, 5) == ["frontend did not live from the warm-up to the end"]


def test_private_memory_is_without_the_arena() -> None:
    me = psutil.Process()
    before = soak.private_nbytes(me)
    fd = os.memfd_create("afferent-arena")
    os.ftruncate(fd, 32 * MB)
    with mmap.mmap(fd, 32 * MB) as shared:
        for at in range(0, len(shared), 4096):
            shared[at] = 1
        assert soak.private_nbytes(me) - before < 8 * MB
        with mmap.mmap(-1, 32 * MB, flags=mmap.MAP_PRIVATE) as private:
            for at in range(0, len(private), 4096):
                private[at] = 1
            assert soak.private_nbytes(me) - before > 24 * MB
    os.close(fd)
