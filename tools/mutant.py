"""One small fault: see `tools.mutants`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change to one file.

    Attributes:
        what: Of the change, in words.
        file: Below ``src/afferent``.
        old: What stands there once.
        new: What stands there instead.
        tests: Files or tests, as pytest takes them; one of them has to fail.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
