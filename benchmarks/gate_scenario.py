"""The scenarios of `benchmarks.gate`: regimes, gates, repetitions and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from afferent.types import GiB, MiB
from benchmarks.gate_servers import plan
from benchmarks.record import MIN_SAMPLES

REGIMES = ("producer", "balanced", "engine")
COUNTS = {"off": (0, False), "1": (1, False), "2": (2, False), "4": (4, False), "8": (8, False)}
COUNTS["4-held"] = (4, True)
"""Gates without a limit on bytes: the maximal number of requests, and whether the permit is held
until the request's end instead of the acceptance.
"""
GATES = (*COUNTS, "bytes", "control")
NUM_REQUESTS, _NUM_QUICK = 64, 12
NUM_PAGES = 3

_PAGE = (1275, 1650)
_ARENA_NBYTES, _QUICK_ARENA_NBYTES = 256 * MiB, 64 * MiB
_QUICK_RUNS = 3
_PREFILL_S = {"producer": 0.02, "engine": 0.4}
_QUICK_PREFILL_S = {"engine": 0.25}
_DECODE_NBYTES_PER_PIXEL = 13  # the maximum: `afferent.media.decode.image`
_SPARE_NBYTES = 2 * GiB
_ALL_START_S, _START_S, _PRODUCE_S = 8.0, 2.0, 0.08  # guesses, for the estimated duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A choice of measurements and repetitions."""

    num_requests: int
    arena_nbytes: int
    runs: int
    regimes: Sequence[str]
    gates: Sequence[str]
    prefill_s: Mapping[str, float] = field(default_factory=lambda: dict(_PREFILL_S))
    page: tuple[int, int] = _PAGE

    @property
    def features_nbytes(self) -> int:
        """Size of the features of all requests."""
        return self.num_requests * NUM_PAGES * plan(*self.page).nbytes

    @property
    def unlimited_arena_nbytes(self) -> int:
        return round(1.7 * self.features_nbytes) + 64 * MiB  # with space for raw media

    @property
    def decode_nbytes(self) -> int:
        """Maximal memory of a worker for a page: the decoder's, and the pixels for the patches."""
        width, height = self.page
        return _DECODE_NBYTES_PER_PIXEL * width * height + plan(width, height).nbytes

    @property
    def needed_nbytes(self) -> int:
        """Maximal memory in use at a time, with a reserve."""
        arenas = self.arena_nbytes if "bytes" in self.gates else 0
        if any(gate in COUNTS for gate in self.gates):
            arenas += self.unlimited_arena_nbytes
        heap = 3 * self.features_nbytes if "control" in self.gates else 0
        return arenas + heap + _SPARE_NBYTES

    @property
    def estimated_s(self) -> float:
        produce_s = self.num_requests * _PRODUCE_S
        runs_s = [
            _START_S + max(produce_s, self.num_requests * self.prefill_s.get(regime, 0.0))
            for regime in self.regimes
        ]
        return _ALL_START_S + self.runs * len(self.gates) * sum(runs_s)


def choose(
    *,
    quick: bool,
    runs: int | None = None,
    requests: int | None = None,
    regimes: Sequence[str] | None = None,
    gates: Sequence[str] | None = None,
) -> Scenario:
    """Return the scenario for these options; the others have defaults."""
    return Scenario(
        num_requests=requests or (_NUM_QUICK if quick else NUM_REQUESTS),
        arena_nbytes=_QUICK_ARENA_NBYTES if quick else _ARENA_NBYTES,
        runs=runs or (_QUICK_RUNS if quick else MIN_SAMPLES),
        regimes=regimes or (("engine",) if quick else REGIMES),
        gates=gates or (("bytes", "control") if quick else GATES),
        prefill_s=_PREFILL_S | (_QUICK_PREFILL_S if quick else {}),
    )
