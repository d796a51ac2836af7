"""The documented table of a key's states is the one of the code."""

from __future__ import annotations

import re
from pathlib import Path

from afferent.store.state.key_state import TRANSITIONS, KeyState

PAGE = Path(__file__).parents[2] / "docs" / "store.md"
ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| ([^|]+) \|$", re.M)


def test_the_page_has_each_transition() -> None:
    written = {
        KeyState(name): {KeyState(each) for each in re.findall(r"`(\w+)`", after)}
        for name, after in ROW.findall(PAGE.read_text())
        if name in list(KeyState)
    }
    assert written == TRANSITIONS


def test_each_state_can_be_reached_and_left() -> None:
    assert set(TRANSITIONS) == set(KeyState)
    assert {after for each in TRANSITIONS.values() for after in each} == set(KeyState)
