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


def test_tags_of_tenants_are_keyed_by_the_secret() -> None:
    tenants = ("", "anna", "ben")
    one, same, other = (keys.tenant_tags(secret) for secret in (b"one", b"one", b"other"))
    assert [one(name) for name in tenants] == [same(name) for name in tenants]
    assert len({tag(name) for tag in (one, other) for name in tenants}) == 6
    assert [keys.tenant_tags(b"")(name) for name in tenants] == list(tenants)


def test_placement_digest_is_of_the_modality_and_the_first_64_kib() -> None:
    head = bytes(range(256)) * 256
    digest = keys.placement_digest(Modality.IMAGE, head)
    assert len(head) == keys.PLACEMENT_NBYTES
    assert digest == keys.placement_digest(Modality.IMAGE, memoryview(head + b"more"))
    others = [(Modality.VIDEO, head), (Modality.IMAGE, head[:-1]), (Modality.IMAGE, b"x" + head)]
    assert len({digest, *(keys.placement_digest(*other) for other in others)}) == 4
