"""The names of items that a server has got."""

from __future__ import annotations

from afferent.engines.http_upstream.known_names import MOST, KnownNames


def test_names_are_known_until_they_are_forgotten() -> None:
    known = KnownNames()
    assert known.among(["a", "b"]) == set()
    known.note(["a", "b"])
    assert known.among(["a", "c", "b"]) == {"a", "b"}
    known.forget({"a", "c"})
    assert known.among(["a", "b"]) == {"b"}


def test_latest_ones_are_kept() -> None:
    known = KnownNames()
    known.note(map(str, range(MOST)))
    known.note(["0", "new"])
    assert known.among(["0", "1", "2", "new"]) == {"0", "2", "new"}
