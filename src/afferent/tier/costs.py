"""Cost model: the time to fetch and to make an object, and the resulting choices. Pure.

It learns everything from observations: the time of a look-up, the rate of the link, the hit rate,
and the ratio of real to expected production time. The tier is asked for objects that are probably
faster to fetch. Objects are copied to it if other nodes would fetch them faster. So a kind that
does not pay on this link is left out automatically.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from afferent.types import ObjectKind

_NEW = 0.2
"""Weight of a new observation."""
_LEAST_HITS = 0.02
_FIRST_LOOKUP_S = 1e-3
_FIRST_NBYTES_PER_S = 125e6
"""Link of 1 Gbit/s, until one has been measured."""
_MEASURED_NBYTES = 64 << 10
"""Smaller transfers give no information on the rate of the link."""
FIRST_EXPLORED, EXPLORE_EVERY = 8, 256
"""Exploration: one in this many objects that would not pay is fetched or copied, to keep learning.

The interval starts short after a problem and doubles up to a length that no 99th percentile shows.
"""
_LEARN_EVERY = 8
"""One in this many objects without a measurement here is made here, even if fetching would pay."""
_BETTER = 0.5
"""Weight of an observation that is better than expected: a bad phase may be over."""
_LEAST_DEADLINE_S = 0.05
_POLL_S = 0.02


_GUESSED = frozenset({ObjectKind.EMBEDDINGS, ObjectKind.RECORDS})
"""Their cost depends on the accelerator or on media hosts: a request can only guess it."""

_NOT_AWAITED = frozenset({ObjectKind.RAW, ObjectKind.RECORDS})
"""Objects from a media host may not be copied to the tier: no node waits for another one's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Time limits: ``timeout_s`` for one exchange, ``wait_s`` for an object of another node."""

    timeout_s: float
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Decision about a missing object.

    Attributes:
        asks: Whether the tier is asked for it.
        waits: Whether to wait for it if another node makes it.
        fetch_s: Time limit to fetch it from the tier.
        wait_s: Time limit to wait for another node.
        why: Short explanation with the numbers behind the choice.
    """

    asks: bool
    waits: bool
    fetch_s: float
    wait_s: float
    why: str


@dataclass(slots=True)
class _Exploring:
    """Schedule of exploration: objects that would not pay and are fetched or copied anyway."""

    every: int = FIRST_EXPLORED
    num_left_out: int = 0

    def is_due(self) -> bool:
        self.num_left_out += 1
        if self.num_left_out < self.every:
            return False
        self.num_left_out = 0
        self.every = min(2 * self.every, EXPLORE_EVERY)
        return True


@dataclass(slots=True)
class _Kind:
    hits: float = 0.5
    ratio: float = 1.0
    """Ratio of the real to the expected production time."""
    s_per_byte: float | None = None
    """Production time as measured here, for kinds without an estimate."""
    num_unmeasured: int = 0
    asking: _Exploring = field(default_factory=_Exploring)
    keeping: _Exploring = field(default_factory=_Exploring)

    def learns(self) -> bool:
        """Whether this object, which would pay by a guess, is made here to measure its cost."""
        if self.s_per_byte is not None:
            return False
        self.num_unmeasured += 1
        return self.num_unmeasured % _LEARN_EVERY == 0


@dataclass(slots=True)
class CostModel:
    """Costs and hit rates, as observed by this node."""

    limits: Limits
    lookup_s: float = _FIRST_LOOKUP_S
    nbytes_per_s: float = _FIRST_NBYTES_PER_S
    _kinds: dict[ObjectKind, _Kind] = field(default_factory=dict)

    # Observations

    def looked_up(self, took_s: float) -> None:
        self.lookup_s += (_BETTER if took_s < self.lookup_s else _NEW) * (took_s - self.lookup_s)

    def fetched(self, nbytes: int, took_s: float) -> None:
        """Observe a fetch: the first byte takes a look-up's time; the rest depends on the link."""
        if nbytes >= _MEASURED_NBYTES:
            carried = nbytes / max(took_s - self.lookup_s, took_s / 10, 1e-6)
            weight = _BETTER if carried > self.nbytes_per_s else _NEW
            self.nbytes_per_s += weight * (carried - self.nbytes_per_s)

    def written(self, nbytes: int, took_s: float) -> None:
        """Observe a write, a lower bound of the link's rate; for nodes that only write."""
        if nbytes / max(took_s, 1e-6) > self.nbytes_per_s:
            self.fetched(nbytes, took_s)

    def came_late(self, nbytes: int, took_s: float) -> None:
        """Observe a fetch that missed its deadline: the link is slower than this rate."""
        self.nbytes_per_s = min(self.nbytes_per_s, nbytes / max(took_s, 1e-6)) / 2
        for known in self._kinds.values():
            known.asking.every = FIRST_EXPLORED

    def was_there(self, kind: ObjectKind, is_hit: bool) -> None:
        known = self._of(kind)
        known.hits = max(_LEAST_HITS, known.hits + _NEW / 4 * (is_hit - known.hits))

    def made(self, kind: ObjectKind, *, nbytes: int, expected_us: int, took_us: int) -> None:
        """Observe a production; ``expected_us`` is 0 if its producer had no estimate."""
        known = self._of(kind)
        if expected_us > 0 and took_us > 0:
            known.ratio += _NEW * (took_us / expected_us - known.ratio)
        elif took_us > 0 and kind in _GUESSED:
            per_byte = took_us / 1e6 / nbytes
            before = per_byte if known.s_per_byte is None else known.s_per_byte
            known.s_per_byte = before + _NEW * (per_byte - before)

    # Choices

    def fetch_s(self, nbytes: int) -> float:
        return self.lookup_s + nbytes / self.nbytes_per_s

    def make_s(self, kind: ObjectKind, *, nbytes: int, cost_us: int) -> float:
        known = self._of(kind)
        if known.s_per_byte is not None:
            return nbytes * known.s_per_byte
        return cost_us / 1e6 * known.ratio

    def choose(self, kind: ObjectKind, *, nbytes: int, cost_us: int) -> Choice:
        """Choose what to do about a missing object with the estimate ``cost_us``."""
        known, fetch_s = self._of(kind), self.fetch_s(nbytes)
        make_s = self.make_s(kind, nbytes=nbytes, cost_us=cost_us)
        pays = known.hits * (make_s - fetch_s) > self.lookup_s
        if pays and kind in _GUESSED and known.learns():
            pays = False
        why = (
            f"fetch {fetch_s * 1e3:.1f} ms, make {make_s * 1e3:.1f} ms, "
            f"{known.hits:.0%} of {kind} found"
        )
        least_s = max(_LEAST_DEADLINE_S, 2 * make_s)
        return Choice(
            asks=pays or known.asking.is_due(),
            waits=(
                pays
                and kind not in _NOT_AWAITED
                and make_s > fetch_s + 4 * self.lookup_s + 2 * _POLL_S
            ),
            fetch_s=min(self.limits.timeout_s, least_s),
            wait_s=min(self.limits.wait_s, 1.5 * make_s + fetch_s),
            why=why,
        )

    def keeps(self, kind: ObjectKind, *, nbytes: int, made_us: int) -> bool:
        """Whether to copy an object: other nodes would fetch it faster than make it.

        An object without a measurement is copied.
        """
        pays = made_us == 0 or made_us / 1e6 > self.fetch_s(nbytes)
        return pays or self._of(kind).keeping.is_due()

    def poll_s(self) -> float:
        """Return the interval of polls for another node's object."""
        return max(_POLL_S, 4 * self.lookup_s)

    def _of(self, kind: ObjectKind) -> _Kind:
        return self._kinds.setdefault(kind, _Kind())
