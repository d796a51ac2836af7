"""The names by which a gateway sends items that a server has got."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from afferent.items.item import ReceivedItem
from afferent.media.families.reencoded import ReencodedFamily
from afferent.proxy.inline_body import InlineMedia
from afferent.proxy.inline_stage import ItemNames
from afferent.proxy.media_locations import Document
from afferent.types import ContentKey, Handle, Modality

ITEM = ReceivedItem(modality=Modality.IMAGE, digest=b"d" * 32, key=ContentKey(b"k" * 32))
MEDIA = InlineMedia(handle=Handle(1, 0, 64, 1), start=0, nbytes=9, media_type="image/png")


def name(
    *,
    secret: bytes = b"secret",
    family: ReencodedFamily = ReencodedFamily(),  # noqa: B008 - it is frozen
    tenant: str = "acme",
    options: dict[str, bytes] | None = None,
    item: ReceivedItem = ITEM,
    **more: Any,
) -> str:
    document = Document(b"", b"", [], options or {})
    return ItemNames(secret, family).within(document, tenant)(item, replace(MEDIA, **more))


def test_name_is_of_all_that_shapes_the_features_and_of_the_tenant() -> None:
    made = {"is_features": True}
    names = [
        name(),
        name(secret=b"another"),
        name(tenant="other"),
        name(tenant=""),
        name(options={"mm_processor_kwargs": b"{}"}),
        name(options={"media_io_kwargs": b"{}"}),
        name(item=replace(ITEM, digest=b"e" * 32)),
        name(item=replace(ITEM, modality=Modality.VIDEO)),
        name(media_type="image/jpeg"),
        name(**made),
        name(**made, family=ReencodedFamily(max_pixels=100)),
    ]
    assert len(set(names)) == len(names)
    assert all(len(each) == 32 for each in names)


def test_name_is_of_nothing_else() -> None:
    assert name() == name(family=ReencodedFamily(max_pixels=100)), "it is not converted"
    assert name() == name(item=replace(ITEM, key=ContentKey(b"l" * 32)), start=4, nbytes=5)
