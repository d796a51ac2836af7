from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from afferent import keys
from afferent.types import Modality


@given(st.lists(st.binary(max_size=6), max_size=4), st.lists(st.binary(max_size=6), max_size=4))
def test_no_two_lists_of_parts_share_a_frame(a: list[bytes], b: list[bytes]) -> None:
    assert (keys.frame(b"tag", *a) == keys.frame(b"tag", *b)) == (a == b)
    assert keys.frame(b"tag", *a) != keys.frame(b"gat", *a)


def test_every_part_of_a_features_key_matters() -> None:
    parts = {"tenant": "t", "fingerprint": b"f", "options": b"o", "media": b"m"}
    base = keys.features_key(**parts)
    assert len(base) == 32
    assert base == keys.features_key(**parts)
    for name in parts:
        changed = {**parts, name: "x" if name == "tenant" else b"x"}
        assert keys.features_key(**changed) != base
    assert keys.features_key(**{**parts, "tenant": "tf", "fingerprint": b""}) != base


def test_every_part_of_an_items_key_matters() -> None:
    parts = {
        "tenant": "t",
        "fingerprint": b"f",
        "modality": Modality.IMAGE,
        "media": b"m",
        "max_pixels": 0,
    }
    other = {
        "tenant": "x",
        "fingerprint": b"x",
        "modality": Modality.VIDEO,
        "media": b"x",
        "max_pixels": 1,
    }
    assert keys.item_key(**parts) == keys.item_key(**parts)
    changed = [keys.item_key(**{**parts, name: other[name]}) for name in parts]
    assert len({keys.item_key(**parts), *changed}) == 1 + len(parts)
