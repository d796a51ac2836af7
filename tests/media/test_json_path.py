"""The path in a JSON text, for any chunks, with a state of limited size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afferent.media.body.cutter import BodyCutter
from afferent.media.body.json_path import ELEMENT, JsonPath
from tests.callbacks import measured
from tests.media.json_bodies import KEYS, Items

DOCUMENTS = st.recursive(
    st.none() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("ab*\\", max_size=3), inner)
    ),
    max_leaves=20,
)


def paths(document: Any, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of all lists and objects, each when it ends, in the order of the text."""
    if isinstance(document, list):
        inner = [found for each in document for found in paths(each, (*above, ELEMENT))]
        return [*inner, above]
    if isinstance(document, dict):
        pairs = document.items()
        inner = [
            found
            for key, value in pairs
            for found in paths(value, (*above, "" if key == ELEMENT else key))
        ]
        return [*inner, above]
    return []


@given(DOCUMENTS, st.integers(1, 5), st.integers(0, 4))
def test_steps_follow_document_as_deep_as_they_are_looked_for(
    document: Any, size: int, max_steps: int
) -> None:
    text = json.dumps(document).encode()
    ends = [at for at in range(len(text)) if text[at : at + 1] in b"]}" and _ends(text[:at])]
    path, found, pos = JsonPath(max_steps=max_steps), [], 0
    for end in ends:
        for start in range(pos, end + 1, size):
            path.feed(text[start : min(start + size, end + 1)])
        pos = end + 1
        found.append(path.steps)
    wanted = [each if len(each) <= max_steps else None for each in paths(document)]
    assert found == wanted


def _ends(before: bytes) -> bool:
    """Return whether the text ends outside of a string."""
    plain = before.replace(b"\\\\", b"").replace(b'\\"', b"")
    return plain.count(b'"') % 2 == 0


def test_steps_beyond_longest_path_are_counted_only() -> None:
    path = JsonPath(max_steps=2)
    path.feed(b'{"a":[' + b'{"b":[' * 100_000)
    assert path.steps is None
    assert len(path._steps) == 2
    path.feed(b"]}" * 100_000)
    assert path.steps == ("a", ELEMENT)
    path.feed(b'],"c":1')
    assert path.steps == ("c",)


@pytest.mark.parametrize("depth", [0, 1_000_000])
def test_window_of_candidates_costs_the_same_at_any_depth(depth: int) -> None:
    """The cost of a candidate does not depend on the number of lists around it."""
    cutter = BodyCutter(
        *(Items(), KEYS),
        max_json_nbytes=1 << 24,
        max_media=1,
        is_parsed=False,
        paths=frozenset({("messages", ELEMENT, "url")}),
    )
    cutter.feed(b"[" * depth)
    with measured() as cost:
        cutter.feed(b'{"url":"data:;base64,"},' * 680)
    assert cost.thread_s < 0.2 * cost.slowness
