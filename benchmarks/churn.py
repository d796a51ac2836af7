"""Measure a full arena: failed allocations, fragmentation and evictions.

Objects of 4 KB to 200 MB, with log-uniform sizes, are requested in an arena of 2 GiB; some much
more often than others. A miss is allocated. Each request pins its object while some dozens of other
requests run, so a large part of the arena can't be evicted. The benchmark needs no memory for the
objects: it only places blocks.

After each failed allocation, a scan over the blocks checks that no run between pinned blocks was
long enough. Both sides get the same operations, in turn.

Times are CPU time, so that other processes do not cause worst cases. ``evicted_share`` is the ratio
of evicted bytes to requested bytes; ``evictions`` are counted per allocation.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

from afferent.errors import StoreFull
from afferent.store.state.allocator import round_up
from afferent.store.state.object import NewObject
from afferent.store.state.object_table import ObjectTable
from afferent.types import ContentKey, GiB, Lease, ObjectKind
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate

QUESTION = "Does a full arena go on allocating, and what does it lose when it does?"
COLUMNS = (
    "side",
    "failures",
    "hit_rate",
    "utilisation",
    "fragmentation",
    "evicted_share",
    "allocate_us",
    "worst_evict_us",
)

_CAPACITY_NBYTES = 2 * GiB
_MIN_NBYTES, _MAX_NBYTES = 4_000, 200_000_000
_NUM_OPERATIONS = 200_000
_NUM_QUICK = 40_000
_NUM_KEYS = 2_000
_MAX_HOLD = 60  # operations for which an object stays pinned
_LOOK_EVERY = 16  # operations between two surveys of the whole arena
_KIND = ObjectKind.FEATURES

Block = tuple[int, int, bool]
"""Offset, size, and whether it is pinned."""


def num_steps(*, quick: bool) -> int:
    return 2 * (MIN_SAMPLES + 1)


def run(
    *, quick: bool, after_sample: Callable[[], None], num_operations: int | None = None
) -> Report:
    """Run the operations in samples; the first one fills the arena and is not counted."""
    report = Report("churn", QUESTION)
    meter = BusyMeter()
    total = num_operations or (_NUM_QUICK if quick else _NUM_OPERATIONS)
    each = -(-total // (MIN_SAMPLES + 1))
    recorders = [_Recorder("afferent", _Afferent(), each), _Recorder("control", _Control(), each)]
    sides = {recorder.name: recorder.sample for recorder in recorders}
    alternate(sides, num_samples=MIN_SAMPLES, after_sample=after_sample)
    report.rows = [recorder.row() for recorder in recorders]
    report.goals = _goals(*report.rows)
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    return report


def _goals(ours: Row, control: Row) -> list[Goal]:
    violations = ours.keys["violations"]
    evicted = _ratio("evicted_share", ours, control)
    hits = _ratio("hit_rate", ours, control)
    return [
        Goal("failures though a run was long enough <= 0", not violations, violations),
        Goal("evicted_share / control <= 1", evicted <= 1, evicted),
        Goal("hit_rate / control >= 1", hits >= 1, hits),
    ]


def _ratio(name: str, ours: Row, control: Row) -> float:
    """Return the median ratio of samples with the same operations."""
    pairs = zip(ours.samples[name], control.samples[name], strict=True)
    return statistics.median(mine / theirs if theirs else math.inf for mine, theirs in pairs)


class Side(Protocol):
    """A cache of objects by number; the requests that pin them are numbers, too."""

    capacity_nbytes: int

    @property
    def used_nbytes(self) -> int: ...

    @property
    def num_evicted(self) -> int: ...

    def pin(self, number: int, who: int) -> bool:
        """Pin an object; return whether it is cached."""

    def allocate(self, number: int, nbytes: int, who: int) -> bool:
        """Allocate a new object and pin it; return whether there is space."""

    def unpin(self, who: int) -> None: ...

    def blocks(self) -> list[Block]: ...


class _Afferent:
    def __init__(self) -> None:
        self._table = ObjectTable(_CAPACITY_NBYTES, segment=1, shares={_KIND: 1.0})
        self.capacity_nbytes = _CAPACITY_NBYTES

    @property
    def used_nbytes(self) -> int:
        return self._table.used_nbytes

    @property
    def num_evicted(self) -> int:
        return self._table.num_evicted[_KIND]

    def pin(self, number: int, who: int) -> bool:
        found = self._table.find(_key(number))
        if found is not None:
            self._table.pin((1, who), found)
        return found is not None

    def allocate(self, number: int, nbytes: int, who: int) -> bool:
        lease: Lease = (1, who)
        try:
            created = self._table.create(lease, NewObject(_KIND, nbytes, _key(number)))
        except StoreFull:
            return False
        if created is not None:
            self._table.seal(lease, created, used_nbytes=nbytes)
        return created is not None

    def unpin(self, who: int) -> None:
        self._table.drop_lease((1, who))

    def blocks(self) -> list[Block]:
        return [(item.handle.offset, item.block_nbytes, item.held) for item in self._table]


class _Control:
    """A baseline: first fit, after the eviction of the least recently used objects anywhere.

    According to its source, Apache Arrow's Plasma store evicts in this way.
    """

    def __init__(self) -> None:
        self.capacity_nbytes = _CAPACITY_NBYTES
        self.used_nbytes = self.num_evicted = 0
        self._taken: list[tuple[int, int]] = []  # offset and size, ascending
        self._places: dict[int, tuple[int, int]] = {}
        self._pins: dict[int, int] = {}
        self._pinned_by: dict[int, int] = {}
        self._unpinned: OrderedDict[int, None] = OrderedDict()

    def pin(self, number: int, who: int) -> bool:
        if number not in self._places:
            return False
        self._unpinned.pop(number, None)
        self._pins[number] = self._pins.get(number, 0) + 1
        self._pinned_by[who] = number
        return True

    def allocate(self, number: int, nbytes: int, who: int) -> bool:
        nbytes = round_up(nbytes)
        while (offset := self._first_fit(nbytes)) is None:
            if not self._unpinned:
                return False
            self._evict()
        self._places[number] = (offset, nbytes)
        insort(self._taken, (offset, nbytes))
        self.used_nbytes += nbytes
        return self.pin(number, who)

    def unpin(self, who: int) -> None:
        number = self._pinned_by.pop(who, None)
        if number is None:
            return
        self._pins[number] -= 1
        if not self._pins[number]:
            del self._pins[number]
            self._unpinned[number] = None

    def blocks(self) -> list[Block]:
        return [(*place, number in self._pins) for number, place in self._places.items()]

    def _first_fit(self, nbytes: int) -> int | None:
        at = 0
        for offset, size in self._taken:
            if offset - at >= nbytes:
                return at
            at = offset + size
        return at if self.capacity_nbytes - at >= nbytes else None

    def _evict(self) -> None:
        number, _ = self._unpinned.popitem(last=False)
        place = self._places.pop(number)
        self._taken.remove(place)
        self.used_nbytes -= place[1]
        self.num_evicted += 1


class _Recorder:
    """One side, its operations, and its results."""

    def __init__(self, name: str, side: Side, num_operations: int) -> None:
        self.name = name
        self._side = side
        self._num_operations = num_operations
        self._random = random.Random(1)  # noqa: S311  (the same for both sides)
        sizes = random.Random(2)  # noqa: S311
        spread = math.log(_MAX_NBYTES / _MIN_NBYTES)
        self._sizes = [
            int(_MIN_NBYTES * math.exp(sizes.random() * spread)) for _ in range(_NUM_KEYS)
        ]
        self._now = 0
        self._ends: dict[int, list[int]] = {}  # the requests that unpin after each operation
        self._measured: dict[str, list[float]] = {}
        self.num_violations = 0

    def row(self) -> Row:
        samples = {name: values[1:] for name, values in self._measured.items()}
        return Row({"side": self.name, "violations": self.num_violations}, samples)

    def sample(self) -> float:
        side, looks, took, evicting = self._side, [], [], []
        num_hits = num_failed = asked_nbytes = evicted_nbytes = 0
        num_evicted = side.num_evicted
        for _ in range(self._num_operations):
            number, nbytes = self._next()
            asked_nbytes += nbytes
            if side.pin(number, self._now):
                num_hits += 1
                continue
            used, before = side.used_nbytes, side.num_evicted
            began = time.thread_time()
            done = side.allocate(number, nbytes, self._now)
            took.append((time.thread_time() - began) * 1e6)
            block = round_up(nbytes) if done else 0
            evicted_nbytes += used + block - side.used_nbytes
            if side.num_evicted > before:
                evicting.append(took[-1])
            if not done:
                num_failed += 1
                self.num_violations += self._longest_run(pinned_only=True) >= round_up(nbytes)
            if len(took) % _LOOK_EVERY == 0:
                looks.append(self._look())
        num_allocated = len(took) - num_failed
        self._note("failures", num_failed)
        self._note("hit_rate", num_hits / self._num_operations)
        self._note("utilisation", statistics.fmean(used for used, _ in looks))
        self._note("fragmentation", statistics.fmean(broken for _, broken in looks))
        self._note("evictions", (side.num_evicted - num_evicted) / num_allocated)
        self._note("evicted_share", evicted_nbytes / asked_nbytes)
        self._note("allocate_us", statistics.median(took))
        self._note("worst_us", max(took))
        return self._note("worst_evict_us", max(evicting, default=0.0))

    def _note(self, name: str, value: float) -> float:
        self._measured.setdefault(name, []).append(value)
        return value

    def _next(self) -> tuple[int, int]:
        """Return the next requested object; unpin those whose time is over."""
        self._now += 1
        for who in self._ends.pop(self._now, ()):
            self._side.unpin(who)
        number = int(_NUM_KEYS ** self._random.random()) - 1  # one request in `n` is for the n-th
        hold = self._random.randint(1, _MAX_HOLD)
        self._ends.setdefault(self._now + hold, []).append(self._now)
        return number, self._sizes[number]

    def _look(self) -> tuple[float, float]:
        """Return the used part of the arena, and the part of the rest beyond its longest run."""
        side = self._side
        free = side.capacity_nbytes - side.used_nbytes
        broken = 1 - self._longest_run(pinned_only=False) / free if free else 0.0
        return side.used_nbytes / side.capacity_nbytes, broken

    def _longest_run(self, *, pinned_only: bool) -> int:
        """Return the longest run between all blocks, or between pinned ones."""
        held = ((at, size) for at, size, pinned in self._side.blocks() if pinned or not pinned_only)
        return max(_gaps(sorted(held), self._side.capacity_nbytes))


def _gaps(blocks: Iterable[tuple[int, int]], capacity_nbytes: int) -> Iterable[int]:
    at = 0
    for offset, size in blocks:
        yield offset - at
        at = offset + size
    yield capacity_nbytes - at


def _key(number: int) -> ContentKey:
    return ContentKey(number.to_bytes(32, "big"))
