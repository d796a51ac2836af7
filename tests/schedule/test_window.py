"""Windows contain the same items as in a linear scan, with exact edges, after any deletions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from afferent.errors import InvalidPlaceholders
from afferent.schedule.sequence import Input, Sequence
from afferent.schedule.step import EncoderInput, Request
from afferent.schedule.window import CrossAttentionIndex, WindowIndex
from afferent.types import Placeholder
from tests.schedule.settings import STATE_MACHINE


def at(*spans: tuple[int, int]) -> list[tuple[Placeholder, int]]:
    """Return items ``[offset, end)``; the value of each is its index."""
    return [(Placeholder(offset, end - offset), n) for n, (offset, end) in enumerate(spans)]


THREE = at((2, 5), (5, 6), (10, 14))


@pytest.mark.parametrize(
    ("start", "end", "lookahead", "found"),
    [
        (0, 2, 0, []),  # an item begins at the end of the window
        (0, 3, 0, [0]),
        (4, 5, 0, [0]),
        (5, 6, 0, [1]),  # an item ends at the start of the window
        (4, 6, 0, [0, 1]),
        (6, 10, 0, []),
        (6, 10, 1, [2]),
        (13, 20, 0, [2]),
        (14, 20, 0, []),
        (0, 99, 0, [0, 1, 2]),
        (3, 3, 0, []),  # an empty window inside an item
        (3, 3, 1, [0]),
        (0, 0, 2, []),
        (0, 0, 3, [0]),
    ],
)
def test_edges_are_exact(start: int, end: int, lookahead: int, found: list[int]) -> None:
    assert list(WindowIndex(THREE).in_window(start, end, lookahead)) == found


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(0, 4), (3, 6)], r"item 1 at \[3, 6\) begins before item 0.*ends at 4"),
        ([(0, 2), (4, 6), (2, 3)], r"item 2 at \[2, 3\) begins before item 1.*ends at 6"),
        ([(0, 2), (2, 2)], r"item 1 at \[2, 2\) is empty"),
        ([(0, 2), (3, 2)], r"item 1 at \[3, 2\) is empty"),
        ([(-1, 2)], r"item 0 at \[-1, 2\) begins before position 0"),
    ],
)
def test_invalid_placeholders_are_named(spans: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(InvalidPlaceholders, match=message):
        WindowIndex(at(*spans))


def test_what_can_not_be_appended_changes_nothing() -> None:
    index = WindowIndex(THREE)
    with pytest.raises(InvalidPlaceholders, match=r"item 4 .* item 3"):
        index.extend(at((14, 20), (19, 22)))
    assert len(index) == 3
    index.extend(at((14, 20)))
    assert index.span(3) == (14, 20)


def test_nothing_is_appended_before_what_was_computed() -> None:
    index = WindowIndex(THREE)
    index.drop_consumed(30)
    with pytest.raises(InvalidPlaceholders, match="ends at 30"):
        index.extend(at((29, 31)))
    index.extend(at((0, 4)), base=30)
    assert list(index.in_window(30, 31)) == [3]


def test_dropped_items_are_gone_and_the_others_keep_their_ordinals() -> None:
    index = WindowIndex(at(*((3 * n, 3 * n + 2) for n in range(1000))))
    for position in range(0, 3000, 7):
        index.drop_consumed(position)
        first = index.num_consumed(position)
        assert len(index) == 1000 - first
        if len(index):
            assert index[first] == first
            assert index.span(first) == (3 * first, 3 * first + 2)
        with pytest.raises(IndexError):
            index[first - 1]
    assert index.num_seen == 1000


def test_memory_follows_what_is_left() -> None:
    """A session of many items, each consumed as it arrives, has a limited index."""
    index = WindowIndex[int]()
    for n in range(10_000):
        index.extend([(Placeholder(4 * n, 4), n)])
        index.drop_consumed(4 * n)
        assert len(index) == 1
        assert len(index._offsets) <= 130


def test_a_few_items_are_not_moved_for_each_that_is_dropped() -> None:
    index = WindowIndex(THREE)
    index.drop_consumed(6)
    assert (len(index), len(index._offsets), index._num_cut) == (1, 3, 0)
    assert list(index.in_window(6, 99)) == [2]


def test_an_index_that_is_over_is_destroyed_bit_by_bit() -> None:
    index = WindowIndex(THREE)
    parts = (index._offsets, index._ends, index._items)
    for num_shed, num_left in ((2, 1), (1, 0), (0, 0)):
        assert index.shed(2) == num_shed
        assert [len(part) for part in parts] == [num_left] * 3


def test_an_input_that_is_over_is_destroyed_with_its_items() -> None:
    items = [EncoderInput(b"k", Placeholder(n, 1), 0) for n in range(5)]
    sequence = Sequence.of(
        Request(id="s", num_tokens=5, items=items, max_tokens=0, session_tokens=100), arrival=0
    )
    sequence.append(Input(arrival=1, num_tokens=2, max_tokens=0, items=items[:2]))
    assert [sequence.shed(4), sequence.shed(1), sequence.shed(9), sequence.shed(9)] == [4, 1, 3, 0]


@pytest.mark.parametrize("kind", [WindowIndex, CrossAttentionIndex])
def test_where_there_is_no_item_a_window_is_whole_at_once(kind: type[WindowIndex[int]]) -> None:
    assert [kind(()).whole_after(start) for start in (0, 1, 7)] == [1, 2, 8]


def test_a_window_ends_before_what_it_would_cut() -> None:
    index = WindowIndex(THREE)
    ends = {(0, 1): 1, (0, 3): 2, (0, 5): 5, (0, 12): 10, (0, 14): 14, (0, 99): 99, (3, 4): 3}
    assert {window: index.whole_before(*window) for window in ends} == ends
    far = WindowIndex(at((1000, 1300)))
    assert far.whole_before(990, 1000 + 300) == 1300, "it ends with the item"


def test_encoder_decoder_items_all_belong_to_the_first_position() -> None:
    index = CrossAttentionIndex(at((0, 1500), (0, 40)))
    assert list(index.in_window(0, 1)) == [0, 1]
    assert list(index.in_window(0, 0)) == []
    assert list(index.in_window(1, 2)) == []
    assert list(index.in_window(39, 1000, lookahead=9)) == []
    assert index.num_consumed(0) == 0
    assert index.num_consumed(1) == 2
    assert index.end == 0
    assert index.needed_at_once([3, 4]) == 7
    assert WindowIndex.needed_at_once([3, 4]) == 4
    index.extend(at((0, 7)))
    index.drop_consumed(1)
    assert len(index) == 0
    with pytest.raises(InvalidPlaceholders, match="item 3 is at 0, at least 1 positions"):
        index.extend(at((0, 7)))


@pytest.mark.parametrize("spans", [[(0, 4), (4, 8)], [(1, 2)], [(0, 0)]])
def test_encoder_decoder_items_are_all_at_0(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidPlaceholders, match="item"):
        CrossAttentionIndex(at(*spans))


spans = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=30)


@given(spans, st.integers(0, 120), st.integers(0, 20), st.integers(0, 5))
def test_a_window_is_what_a_scan_finds(
    gaps: list[tuple[int, int]], start: int, length: int, lookahead: int
) -> None:
    placed, position = [], 0
    for gap, size in gaps:
        placed.append((position + gap, position + gap + size))
        position += gap + size
    found = WindowIndex(at(*placed)).in_window(start, start + length, lookahead)
    window = range(start, start + length + lookahead)
    assert list(found) == [n for n, span in enumerate(placed) if set(window) & set(range(*span))]


class WindowMachine(RuleBasedStateMachine):
    """An index that grows and is consumed, compared with a list of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.index: WindowIndex[int] = WindowIndex()
        self.items: list[tuple[int, int]] = []
        self.position = 0  # positions before it are consumed
        self.end = 0

    @rule(gaps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=12))
    def extend(self, gaps: list[tuple[int, int]]) -> None:
        base, placed, end = max(self.end, self.position), [], 0
        for gap, size in gaps:
            placed.append((Placeholder(end + gap, size), len(self.items)))
            self.items.append((base + end + gap, base + end + gap + size))
            end += gap + size
        self.index.extend(placed, base=base)
        self.end = base + end

    @rule(back=st.integers(1, 4), length=st.integers(1, 9))
    def extend_wrongly(self, back: int, length: int) -> None:
        offset = max(self.end, self.position) - back
        with pytest.raises(InvalidPlaceholders):
            self.index.extend([(Placeholder(offset, length), -1)])

    @rule(far=st.integers(-5, 60))
    def consume(self, far: int) -> None:
        self.position = max(self.position, self.position + far)
        self.index.drop_consumed(self.position)

    @rule(back=st.integers(-9, 90), length=st.integers(0, 40), lookahead=st.integers(0, 9))
    def ask(self, back: int, length: int, lookahead: int) -> None:
        start = self.position + back
        stop = start + length + lookahead
        expected = [
            n
            for n, (offset, end) in enumerate(self.items)
            if end > self.position and max(offset, start) < min(end, stop)
        ]
        assert list(self.index.in_window(start, start + length, lookahead)) == expected
        assert [self.index[n] for n in expected] == expected
        assert [self.index.span(n) for n in expected] == [self.items[n] for n in expected]

    @invariant()
    def counts_agree(self) -> None:
        consumed = sum(end <= self.position for _, end in self.items)
        assert self.index.num_consumed(self.position) == consumed
        assert len(self.index) == len(self.items) - consumed
        assert self.index.num_seen == len(self.items)


TestWindowMachine = WindowMachine.TestCase
TestWindowMachine.settings = STATE_MACHINE
