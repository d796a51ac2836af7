"""Delta debugging: a shorter plan that leads to the same kind of violation."""

from __future__ import annotations

from tests.simulation.running import run_seed


def kind_of(violation: str) -> str:
    """Return the kind of a violation: the word before the colon."""
    return violation.partition(":")[0]


def shrink(seed: int, elements: list[int], violation: str) -> frozenset[int]:
    """Return elements that can be left out while the run still ends with that kind of violation.

    Halves are tried first, then quarters, and so on (delta debugging).
    """
    dropped: frozenset[int] = frozenset()
    kept, size = list(elements), max(len(elements) // 2, 1)
    while True:
        parts = [kept[start : start + size] for start in range(0, len(kept), size)]
        for part in parts:
            tried = dropped | frozenset(part)
            if kind_of(run_seed(seed, dropped=tried).violation) == kind_of(violation):
                dropped, kept = tried, [each for each in kept if each not in part]
        if size == 1:
            return dropped
        size = max(size // 2, 1)
