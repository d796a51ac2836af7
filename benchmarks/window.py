"""Measure a window, a step, a release, an abort and a whole session for growing numbers of items.

Every item has 4 positions and 4 rows of embeddings; a window is 8 positions. All sizes and all
sides run in turn, in one thread, so that other load affects all of them alike. Garbage is collected
before a timed part and not during it, and each sample builds all objects anew.

`bisect_us` is the baseline: a bisection over the request's own list of items by a key function,
then item by item until one begins after the window, as in vLLM since 2026. `scan_us` checks every
item, as SGLang does, and other engines did before. A step, a release and an abort have no baseline:
a whole scheduler's work differs from that of an engine.

Expected before the measurement: a window 0.5 to 0.7 us, the bisection 1.2 to 2 us at 32,000 items
(15 calls of a key function instead of two searches in lists of integers), so 2 to 3 times ours and
as flat; the scan 1,500 us.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import msgspec

from afferent.schedule.encoder_cache import EncoderCache
from afferent.schedule.scheduler import Scheduler
from afferent.schedule.step import EncoderInput, Limits, Request, Step
from afferent.schedule.window import WindowIndex
from afferent.types import Placeholder
from benchmarks.controls.item_list import items_in_window
from benchmarks.record import MIN_SAMPLES, BusyMeter, Goal, Report, Row, alternate
from tests.collector import frozen

QUESTION = (
    "What do a window (beside a bisection by key, as vLLM does), a step, a release and a session "
    "cost as items grow in number?"
)
ITEMS = (100, 1_000, 32_000)
COLUMNS = (
    "items",
    "window_us",
    "bisect_us",
    "scan_us",
    "step_us",
    "release_us",
    "abort_us",
    "message_nbytes",
    "session_cpu_s",
)

_LENGTH = 4  # positions and embedding rows of an item
_WINDOW = 8
_NUM_WINDOWS = 500
_NUM_STEPS = 64  # fewer than the items of the smallest case
_NUM_ABORTS = 5
_MAX_WINDOW_US = 2.0
_MIN_BISECT_TIMES = 1.5
_MAX_SESSION_STEP_US = 60.0
_MAX_MESSAGE_GROWTH_NBYTES = 8
_SIDES = ("window", "bisect", "scan", "step", "release", "abort", "session")


def num_steps(*, quick: bool) -> int:
    return len(_SIDES) * len(ITEMS) * (_num_samples(quick=quick) + 1)


def run(*, quick: bool, after_sample: Callable[[], None], items: Sequence[int] = ITEMS) -> Report:
    """Run the benchmark with these numbers of items, ascending; goals compare last and first."""
    report = Report("window", QUESTION)
    meter = BusyMeter()
    recorders = {number: _Recorder(number) for number in items}
    sides = {
        f"{name} {number}": getattr(recorder, name)
        for number, recorder in recorders.items()
        for name in _SIDES
    }
    with frozen():  # each side collects first
        alternate(sides, num_samples=_num_samples(quick=quick), after_sample=after_sample)
    report.rows = [recorder.row() for recorder in recorders.values()]
    report.goals = _goals(report.rows)
    report.busy_cores_elsewhere = meter.busy_cores_elsewhere()
    return report


def _num_samples(*, quick: bool) -> int:
    return MIN_SAMPLES if quick else 3 * MIN_SAMPLES


def _goals(rows: list[Row]) -> list[Goal]:
    goals = []

    def at_most(what: str, value: float, limit: float) -> None:
        goals.append(Goal(f"{what} <= {limit:g}", value <= limit, value))

    first, last = rows[0], rows[-1]
    for row in rows:
        at_most(f"window_us at {row.keys['items']}", row.median("window_us"), _MAX_WINDOW_US)
    for name, limit in (
        ("window_us", 3),
        ("scattered_us", 3),
        ("step_us", 2),
        ("release_us", 2),
        ("abort_us", 2),
    ):
        at_most(_between(name, first, last), _ratio(name, first, last), limit)
    pairs = zip(last.samples["bisect_us"], last.samples["window_us"], strict=True)
    times = statistics.median(control / ours for control, ours in pairs)
    what = f"bisect_us / window_us at {last.keys['items']} >= {_MIN_BISECT_TIMES:g}"
    goals.append(Goal(what, times >= _MIN_BISECT_TIMES, times))
    session_us = last.median("session_cpu_s") / last.keys["items"] * 1e6
    what = f"session CPU us per step at {last.keys['items']}"
    at_most(what, session_us, _MAX_SESSION_STEP_US)
    growth = last.median("message_nbytes") - first.median("message_nbytes")
    at_most("message_nbytes, growth", growth, _MAX_MESSAGE_GROWTH_NBYTES)
    return goals


def _between(name: str, first: Row, last: Row) -> str:
    return f"{name} at {last.keys['items']} / at {first.keys['items']}"


def _ratio(name: str, first: Row, last: Row) -> float:
    """Return the median ratio of samples that were taken in the same turn."""
    pairs = zip(first.samples[name], last.samples[name], strict=True)
    return statistics.median(large / small for small, large in pairs)


class _Recorder:
    """The sides at one number of items, with their measurements, the first (warm-up) included."""

    def __init__(self, num_items: int) -> None:
        self._num_items = num_items
        self._items = _make_items(num_items)
        self._index = WindowIndex((item.placeholder, item) for item in self._items)
        self._measured: dict[str, list[float]] = {}
        # The same windows in every sample: one after another, as in a prefill, from the middle of
        # the prompt; and all over the prompt, where each access misses the caches.
        span = num_items * _LENGTH - _WINDOW
        self._in_order = [(span // 2 + n * _LENGTH) % span for n in range(_NUM_WINDOWS)]
        self._scattered = [(n * 7919) % span for n in range(_NUM_WINDOWS)]

    def row(self) -> Row:
        samples = {name: values[1:] for name, values in self._measured.items()}
        return Row({"items": self._num_items}, samples)

    def _note(self, name: str, value: float) -> float:
        self._measured.setdefault(name, []).append(value)
        return value

    # Sides

    def window(self) -> float:
        """Find windows with two bisections."""
        self._note("scattered_us", self._ask(self._scattered))
        return self._note("window_us", self._ask(self._in_order))

    def _ask(self, starts: list[int]) -> float:
        index = self._index
        began = time.perf_counter()
        for start in starts:
            index.in_window(start, start + _WINDOW)
        return (time.perf_counter() - began) / len(starts) * 1e6

    def bisect(self) -> float:
        """Find windows as the baseline: see `controls/item_list.py`."""
        items, starts = self._items, self._in_order
        began = time.perf_counter()
        for start in starts:
            items_in_window(items, start, start + _WINDOW)
        return self._note("bisect_us", (time.perf_counter() - began) / len(starts) * 1e6)

    def scan(self) -> float:
        """Check every item, as SGLang does, and as other engines did before."""
        items = self._items
        starts = self._scattered[: max(1, 20_000 // len(items))]
        began = time.perf_counter()
        for start in starts:
            end = start + _WINDOW
            found = []
            for ordinal, item in enumerate(items):
                place = item.placeholder
                if place.offset < end and place.offset + place.length > start:
                    found.append(ordinal)
        return self._note("scan_us", (time.perf_counter() - began) / len(starts) * 1e6)

    def step(self) -> float:
        """Measure a step of chunked prefill: one item is encoded, one released, one evicted."""
        scheduler = _busy_scheduler(self._items)
        gc.collect()
        began = time.perf_counter()
        for _ in range(_NUM_STEPS):
            scheduler.next_step()
        return self._note("step_us", (time.perf_counter() - began) / _NUM_STEPS * 1e6)

    def release(self) -> float:
        """Measure the release of some items by a request that uses all its items at once."""
        cache = EncoderCache(
            capacity_embeds=self._num_items * _LENGTH, capacity_nbytes=self._num_items
        )
        for item in self._items:
            plan = cache.plan("a", item.key, num_embeds=_LENGTH, nbytes=1)
            assert plan is not None  # noqa: S101  (there is room for all)
            cache.commit(plan)
        released = [item.key for item in self._items[:_NUM_STEPS]]
        gc.collect()
        began = time.perf_counter()
        for key in released:
            cache.release("a", key)
        return self._note("release_us", (time.perf_counter() - began) / _NUM_STEPS * 1e6)

    def abort(self) -> float:
        """Measure an abort in the middle of a prefill, and the steps that clean up after it.

        The scheduler has the last references to the items, so freeing them is included.
        """
        took, after = [], []
        for _ in range(_NUM_ABORTS):
            scheduler = _busy_scheduler(_make_items(self._num_items))
            for _ in range(8):
                scheduler.next_step()
            gc.collect()
            began = time.perf_counter()
            scheduler.abort("a")
            took.append(time.perf_counter() - began)
            for _ in range(8):
                began = time.perf_counter()
                scheduler.next_step()
                after.append(time.perf_counter() - began)
        self._note("after_abort_us", statistics.median(after) * 1e6)
        return self._note("abort_us", statistics.median(took) * 1e6)

    def session(self) -> float:
        """Measure a realtime session: in each step, an item is appended, computed and answered.

        The result is the CPU time of everything, including the encoding of the messages.
        """
        items = [item.key for item in self._items]
        scheduler = Scheduler(Limits(max_num_seqs=1, cache_num_embeds=64 * _LENGTH))
        positions = (len(items) + 1) * (_LENGTH + 2)
        scheduler.add(Request(id="a", num_tokens=1, max_tokens=1, session_tokens=positions))
        _do(scheduler)
        most_nbytes = 0
        gc.collect()
        began = time.process_time()
        for key in items:
            more = [EncoderInput(key, Placeholder(0, _LENGTH))]
            scheduler.append("a", num_tokens=_LENGTH, max_tokens=1, items=more)
            most_nbytes = max(most_nbytes, len(msgspec.msgpack.encode(_do(scheduler))))
        took = time.process_time() - began
        self._note("message_nbytes", most_nbytes)
        return self._note("session_cpu_s", took)


def _do(scheduler: Scheduler) -> Step:
    """Run a step, and record its token at once."""
    step = scheduler.next_step()
    scheduler.record("a", is_eos=False)
    return step


def _make_items(num_items: int) -> list[EncoderInput]:
    return [
        EncoderInput(n.to_bytes(32, "big"), Placeholder(n * _LENGTH, _LENGTH), 1)
        for n in range(num_items)
    ]


def _busy_scheduler(items: list[EncoderInput]) -> Scheduler:
    """Return a scheduler with one request in its prefill, and with a full encoder cache."""
    scheduler = Scheduler(
        Limits(
            max_num_seqs=1,
            max_num_batched_tokens=_LENGTH,
            max_num_batched_embeds=_LENGTH,
            cache_num_embeds=16 * _LENGTH,
        )
    )
    scheduler.add(Request(id="a", num_tokens=len(items) * _LENGTH, max_tokens=1, items=items))
    for _ in range(20):
        scheduler.next_step()
    return scheduler
