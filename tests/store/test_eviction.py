"""The choice of blocks to evict, compared with a search over all extents."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from afferent.store.state.allocator import ALIGNMENT, Allocator
from afferent.store.state.eviction import choose_victims
from tests.examples import examples

LINES = 24


def full(*sizes: int) -> Allocator:
    """Return an allocator with adjacent blocks of these numbers of lines."""
    allocator = Allocator(sum(sizes) * ALIGNMENT)
    for size in sizes:
        allocator.allocate(size * ALIGNMENT)
    return allocator


def lines(*numbers: int) -> list[int]:
    return [number * ALIGNMENT for number in numbers]


def test_the_oldest_makes_way() -> None:
    assert choose_victims(full(1, 1, 1, 1), lines(2, 0, 3), 64) == lines(2)


def test_old_ones_that_do_not_lie_together_stay() -> None:
    """The oldest two would free enough bytes, but not in one extent."""
    assert choose_victims(full(1, 1, 1, 1), lines(0, 2, 3), 128) == lines(2, 3)


def test_only_blocks_of_the_hole_go() -> None:
    assert choose_victims(full(1, 1, 4), lines(0, 2), 256) == lines(2)


def test_the_fewest_bytes_of_a_long_hole() -> None:
    """An extent of six lines could be freed; the blocks at one end of it suffice."""
    assert choose_victims(full(3, 1, 2), lines(0, 4, 3), 192) == lines(0)
    assert choose_victims(full(2, 1, 2), lines(0, 3, 2), 192) == lines(0, 2)


def test_free_runs_are_part_of_the_hole() -> None:
    allocator = full(1, 2, 1, 1)
    allocator.free(64)
    assert choose_victims(allocator, lines(4, 3), 192) == lines(3)
    assert choose_victims(allocator, lines(0, 3), 256) == lines(0, 3)


def test_what_is_kept_divides() -> None:
    assert choose_victims(full(2, 1, 2), lines(0, 3), 192) is None
    assert choose_victims(full(2, 1, 2), [], 64) is None


@st.composite
def arenas(draw: st.DrawFn) -> tuple[Allocator, list[int], list[bool]]:
    """Draw an allocator, its blocks in order of address, and which of them are pinned."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=10))
    allocator = full(*sizes)
    blocks, at = [], 0
    for size in sizes:
        if draw(st.integers(0, 3)):
            blocks.append(at)
        else:
            allocator.free(at)
        at += size * ALIGNMENT
    return allocator, blocks, [draw(st.booleans()) for _ in blocks]


def cheapest(
    allocator: Allocator, ages: dict[int, int], kept: set[int], nbytes: int
) -> tuple[int, int] | None:
    """Return the age of the youngest block and the bytes lost in the cheapest extent, if any."""
    costs = []
    for start in range(0, allocator.capacity_nbytes - nbytes + 1, ALIGNMENT):
        lost = [
            block
            for block in [*ages, *kept]
            if block < start + nbytes and block + allocator.size_of(block) > start
        ]
        if kept.isdisjoint(lost):
            youngest = max(ages[block] for block in lost)
            costs.append((youngest, sum(map(allocator.size_of, lost))))
    return min(costs, default=None)


@given(arenas(), st.integers(1, 16), st.randoms(use_true_random=False))
@examples(400, storm=1500)
def test_against_every_run(
    arena: tuple[Allocator, list[int], list[bool]], size: int, random: object
) -> None:
    allocator, blocks, keep = arena
    kept = {block for block, stays in zip(blocks, keep, strict=True) if stays}
    candidates = [block for block in blocks if block not in kept]
    random.shuffle(candidates)  # type: ignore[attr-defined]
    nbytes = size * ALIGNMENT
    if allocator.largest_free_nbytes >= nbytes:
        return  # no block needs to be evicted
    ages = {block: age for age, block in enumerate(candidates)}
    before = sorted((block, allocator.size_of(block)) for block in blocks)
    chosen = choose_victims(allocator, candidates, nbytes)
    assert sorted((block, allocator.size_of(block)) for block in blocks) == before
    best = cheapest(allocator, ages, kept, nbytes)
    if chosen is None:
        assert best is None
        return
    assert best == (max(ages[block] for block in chosen), sum(map(allocator.size_of, chosen)))
    for block in chosen:
        allocator.free(block)
    assert allocator.largest_free_nbytes >= nbytes
