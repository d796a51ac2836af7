"""The items of a request and their keys, with a store in which every lookup is a hit."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from afferent import keys
from afferent.admission.shares import Share
from afferent.builtin.pipeline.request import GenerateRequest, Message
from afferent.config import RequestLimits
from afferent.items.item import ItemSettings, Processor, RequestItems
from afferent.items.names import Names
from afferent.items.receive import ItemReader
from afferent.items.request import MediaPart, SeenMedia
from afferent.media.body.raw import RawMedia
from afferent.media.workers.discover import family_of
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.items import Find
from afferent.store.protocol.results import Hit, Outcome
from afferent.store.state.region import DEFAULT_SHARES
from afferent.telemetry.trace import Trace
from afferent.types import Handle, Modality
from tests.builtin.frontends import SHAPES
from tests.images import encoded, photo

DIGEST = bytes(range(32))


class FullStore:
    """A store in which every lookup is a hit; it records the pinned objects."""

    def __init__(self) -> None:
        self.num_asked, self.pinned = 0, set[Handle]()

    async def acquire(self, request_id: str, items: list[Find]) -> list[Outcome]:
        self.num_asked += len(items)
        handles = [Handle(0, 0, 64, index) for index, _ in enumerate(items)]
        self.pinned.update(handles)
        return [Hit(handle) for handle in handles]

    async def release(self, request_id: str, handles: list[Handle]) -> None:
        self.pinned.difference_update(handles)


def read(
    *parts: MediaPart, tenant: str = "", full_store: FullStore | None = None, **more: Any
) -> RequestItems:
    async def main() -> RequestItems:
        store = cast(AsyncDaemonStore, full_store or FullStore())
        reader = ItemReader(
            store,
            Processor(family_of(SHAPES), b"fingerprint"),
            Names(store, timeout_s=1.0),
            ItemSettings(limits=RequestLimits(), shares=DEFAULT_SHARES, timeout_s=1.0, **more),
        )
        request = GenerateRequest(
            request_id="r", messages=(Message("user", parts),), share=Share(tenant)
        )
        try:
            return await reader.read(request, Trace("r", "POST /"))
        finally:
            await reader.close()

    return asyncio.run(main())


def part(modality: Modality = Modality.IMAGE, digest: bytes = DIGEST, **known: Any) -> MediaPart:
    return MediaPart(modality, SeenMedia(digest), **known)


def test_one_file_is_an_item_of_each_modality() -> None:
    items = read(*map(part, Modality)).in_order
    assert len({item.key for item in items}) == len(Modality)
    assert [item.modality for item in items] == list(Modality)


def test_what_is_shown_twice_is_one_item() -> None:
    one, other = part(), part(digest=bytes(32))
    items = read(one, other, one)
    assert items.in_order[0] is items.in_order[2]
    assert items.distinct == list(items.in_order[:2])


def test_tenants_have_keys_of_their_own() -> None:
    (ours,), (theirs,) = (read(part(), tenant=name).in_order for name in ("ours", "theirs"))
    assert ours.key != theirs.key
    assert ours.digest == theirs.digest


def test_what_was_looked_for_is_not_pinned_while_the_rest_comes() -> None:
    """Else requests that wait for space would wait for one another."""
    store = FullStore()
    read(part(), part(digest=bytes(32)), full_store=store)
    assert store.num_asked == 2
    assert store.pinned == set()


def sent(width: int, **known: Any) -> MediaPart:
    data = encoded(photo(width, 40), "PNG")
    return MediaPart(Modality.IMAGE, RawMedia("data", len(data), data=data), **known)


def test_sent_image_without_options_has_the_name_that_the_upstream_gives_it() -> None:
    def name_of(modality: Modality, file: bytes | memoryview) -> bytes:
        return keys.digest(bytes(file) + modality.encode())

    parts = sent(30), sent(31, max_pixels=400), part()
    items = read(*parts, name_of=name_of).in_order
    raw = parts[0].source
    assert isinstance(raw, RawMedia)
    assert [item.alias for item in items] == [name_of(Modality.IMAGE, raw.data or b""), b"", b""]
    assert [item.alias for item in read(*parts).in_order] == [b""] * 3


def test_tenants_have_other_keys_with_another_secret() -> None:
    found = [
        read(part(), tenant=tenant, tenant_secret=secret).in_order[0].key
        for tenant in ("", "anna")
        for secret in (b"", b"one", b"other")
    ]
    assert len(set(found)) == 6
    assert found[0] == read(part()).in_order[0].key
