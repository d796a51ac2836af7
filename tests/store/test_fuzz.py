"""A short run of the targets of ``make fuzz``."""

from __future__ import annotations

import pytest

from tests.store import fuzz


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_some_cases(target: str) -> None:
    cases = [f"{target}/0/{number}" for number in range(1000)]
    accepted = sum(fuzz.run_case(name) for name in cases)
    print(f"seeds {cases[0]} to {cases[-1]}")
    assert 0 < accepted < len(cases)
