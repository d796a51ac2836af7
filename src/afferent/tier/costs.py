"""What an object costs to fetch and to make, and what follows for it. Pure.

Everything is learned from what was done: how long a look-up takes, what the link carries, how often
something is found, and how much longer or shorter than expected making takes here. What is asked of
the tier is what is likely to be had sooner from there, and what is kept is what others would have
sooner from there. So a kind that does not pay on this link is left out by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from afferent.types import ObjectKind

_NEW = 0.2
"""The weight of a new observation."""
_LEAST_HITS = 0.02
_FIRST_LOOKUP_S = 1e-3
_FIRST_NBYTES_PER_S = 125e6
"""A link of 1 Gbit/s, until one has been measured."""
_MEASURED_NBYTES = 64 << 10
"""Less tells nothing of what a link carries."""
FIRST_EXPLORED, EXPLORE_EVERY = 8, 256
"""Of what would not pay one in so many is asked for, or kept, all the same, or nothing new is
learned: soon after something has gone wrong, then less and less often, in the end so seldom that no
99th percentile shows it.
"""
_LEARN_EVERY = 8
"""Of what nobody here has measured one in so many is made here, though it would seem to pay."""
_BETTER = 0.5
"""The weight of an observation that is better than what was expected: what was bad may be over."""
_LEAST_DEADLINE_S = 0.05
_POLL_S = 0.02


_GUESSED = frozenset({ObjectKind.EMBEDDINGS, ObjectKind.RECORDS})
"""What they cost depends on the accelerator, or on media hosts: who asks for them can but guess."""

_NOT_AWAITED = frozenset({ObjectKind.RAW, ObjectKind.RECORDS})
"""What comes from a media host need not be kept: nobody waits for another node to do so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """``timeout_s`` is for one exchange with the tier, ``wait_s`` for what another node makes."""

    timeout_s: float
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is done about an object that is missing.

    Attributes:
        asks: Whether the tier is asked for it.
        waits: Whether it is waited for if another node makes it.
        fetch_s: For so long it may take to come from the tier.
        wait_s: For so long another node's making of it is waited for.
        why: In a few words, with the figures that it was chosen by.
    """

    asks: bool
    waits: bool
    fetch_s: float
    wait_s: float
    why: str


@dataclass(slots=True)
class _Exploring:
    """Of what would not pay, which is done all the same."""

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
    """Of the time that making takes to the time that it was expected to take."""
    s_per_byte: float | None = None
    """What making takes, where nothing is expected of it: as it was measured here."""
    num_unmeasured: int = 0
    asking: _Exploring = field(default_factory=_Exploring)
    keeping: _Exploring = field(default_factory=_Exploring)

    def learns(self) -> bool:
        """Whether this one, which would pay by a guess, is made here to see what that takes."""
        if self.s_per_byte is not None:
            return False
        self.num_unmeasured += 1
        return self.num_unmeasured % _LEARN_EVERY == 0


@dataclass(slots=True)
class CostModel:
    limits: Limits
    lookup_s: float = _FIRST_LOOKUP_S
    nbytes_per_s: float = _FIRST_NBYTES_PER_S
    _kinds: dict[ObjectKind, _Kind] = field(default_factory=dict)

    # What was measured

    def looked_up(self, took_s: float) -> None:
        self.lookup_s += (_BETTER if took_s < self.lookup_s else _NEW) * (took_s - self.lookup_s)

    def fetched(self, nbytes: int, took_s: float) -> None:
        """The first byte takes a look-up's time; what is behind it is the link."""
        if nbytes >= _MEASURED_NBYTES:
            carried = nbytes / max(took_s - self.lookup_s, took_s / 10, 1e-6)
            weight = _BETTER if carried > self.nbytes_per_s else _NEW
            self.nbytes_per_s += weight * (carried - self.nbytes_per_s)

    def written(self, nbytes: int, took_s: float) -> None:
        """The link carries at least so much: a node that only writes learns of it, too."""
        if nbytes / max(took_s, 1e-6) > self.nbytes_per_s:
            self.fetched(nbytes, took_s)

    def came_late(self, nbytes: int, took_s: float) -> None:
        """So much was to come, and did not in this time: whatever the link carries, it is less."""
        self.nbytes_per_s = min(self.nbytes_per_s, nbytes / max(took_s, 1e-6)) / 2
        for known in self._kinds.values():
            known.asking.every = FIRST_EXPLORED

    def was_there(self, kind: ObjectKind, is_hit: bool) -> None:
        known = self._of(kind)
        known.hits = max(_LEAST_HITS, known.hits + _NEW / 4 * (is_hit - known.hits))

    def made(self, kind: ObjectKind, *, nbytes: int, expected_us: int, took_us: int) -> None:
        """What was expected is 0 where who made it is not who could be asked."""
        known = self._of(kind)
        if expected_us > 0 and took_us > 0:
            known.ratio += _NEW * (took_us / expected_us - known.ratio)
        elif took_us > 0 and kind in _GUESSED:
            per_byte = took_us / 1e6 / nbytes
            before = per_byte if known.s_per_byte is None else known.s_per_byte
            known.s_per_byte = before + _NEW * (per_byte - before)

    # What follows

    def fetch_s(self, nbytes: int) -> float:
        return self.lookup_s + nbytes / self.nbytes_per_s

    def make_s(self, kind: ObjectKind, *, nbytes: int, cost_us: int) -> float:
        known = self._of(kind)
        if known.s_per_byte is not None:
            return nbytes * known.s_per_byte
        return cost_us / 1e6 * known.ratio

    def choose(self, kind: ObjectKind, *, nbytes: int, cost_us: int) -> Choice:
        """What to do about a missing object of which ``cost_us`` was expected."""
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
        """Whether others would have it sooner from the tier than by making it.

        What nobody has measured is kept.
        """
        pays = made_us == 0 or made_us / 1e6 > self.fetch_s(nbytes)
        return pays or self._of(kind).keeping.is_due()

    def poll_s(self) -> float:
        """Between two looks at whether another node has made something."""
        return max(_POLL_S, 4 * self.lookup_s)

    def _of(self, kind: ObjectKind) -> _Kind:
        return self._kinds.setdefault(kind, _Kind())
