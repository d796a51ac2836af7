"""One small fault: see `tools.mutants`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change to one file.

    Attributes:
        what: A description of the change.
        file: Below ``src/afferent``.
        old: The text to replace, which occurs once.
        new: The replacement.
        tests: Files or tests, as pytest takes them; one of them has to fail.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
