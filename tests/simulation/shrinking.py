"""A shorter history that breaks the same promise: what a seed's plan can do without is left out."""

from __future__ import annotations

from tests.simulation.running import run_seed


def kind_of(violation: str) -> str:
    """Which promise it is: the word before the colon."""
    return violation.partition(":")[0]


def shrink(seed: int, elements: list[int], violation: str) -> frozenset[int]:
    """What can be left out so that the run still ends with the same kind of violation.

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
