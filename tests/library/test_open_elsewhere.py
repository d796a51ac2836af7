"""`Features.open`: references in another store, and stores whose address changes."""

from __future__ import annotations

import asyncio
import io
import pickle
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from afferent import AsyncFeatures, DaemonStore, FailedItem, Features, MiB, StoreServer
from afferent.batch import item_routes
from afferent.errors import InvalidMedia, StaleHandle, StoreUnavailable
from tests.images import photo

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def pools() -> Iterator[tuple[Features, Features]]:
    with (
        Features("shapes", where="pool", num_workers=1, arena_nbytes=64 * MiB) as one,
        Features("shapes", where="pool", num_workers=1, arena_nbytes=64 * MiB) as other,
    ):
        yield one, other


def png(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (64, 64), (number, 0, 0)).save(out, "PNG")
    return out.getvalue()


def red(features: object) -> int:
    return int(np.asarray(features["pixel_values"]).max())  # type: ignore[index]


def num_made(features: Features) -> int:
    with DaemonStore(features.address or "", name="test") as store:
        return store.stat().num_jobs_made


def test_a_reference_opens_in_another_store_and_is_made_there_once(
    pools: tuple[Features, Features],
) -> None:
    one, other = pools
    sources = [photo(90, 60, number) for number in range(5)]
    items = [one.share(source) for source in sources]
    before = num_made(other)
    for _ in range(2):
        for item, source in zip(items, sources, strict=True):
            opened = other.open(item, source)
            assert opened.key == item.key
            for name, array in item.features().items():
                assert np.array_equal(opened[name], array)
            assert not opened["pixel_values"].flags.writeable
    assert num_made(other) == before + 5
    assert other.open(items[0]).key == items[0].key, "no source is needed now"


def test_a_reference_opens_without_any_store(pools: tuple[Features, Features]) -> None:
    image = photo(90, 60, 11)
    with Features("shapes", where="pool", num_workers=1) as former:
        item = former.share(image)
        expected = {name: array.copy() for name, array in item.features().items()}
        item.release()
    with Features("shapes") as here:
        opened = here.open(pickle.loads(pickle.dumps(item)), image)  # noqa: S301 - ours
        assert opened.keys() == expected.keys()
        assert all(np.array_equal(opened[name], array) for name, array in expected.items())
        with pytest.raises(StoreUnavailable):
            here.open(item)


def test_the_connections_of_references_end_with_their_stores() -> None:
    def num_connections() -> int:
        return sum(thread.name == "shared-items-store" for thread in threading.enumerate())

    with Features("shapes", where="pool", num_workers=1, arena_nbytes=16 * MiB) as features:
        item = features.share(png(1))
        views = pickle.loads(pickle.dumps(item)).features()  # noqa: S301 - ours
        assert num_connections() == 1
    assert num_connections() == 0
    assert red(views) == 1
    for _ in range(3):
        with StoreServer(16 * MiB) as server, pytest.raises(StaleHandle):
            item.in_store(server.address).features()
        assert num_connections() == 1


def test_another_source_is_refused_before_anything_is_made(
    pools: tuple[Features, Features],
) -> None:
    one, other = pools
    item, before = one.share(png(201)), num_made(other)
    with pytest.raises(InvalidMedia, match="not the one that the reference was made of"):
        other.open(item, png(202))
    with pytest.raises(StaleHandle):
        other.open(item)
    assert num_made(other) == before


def test_a_batch_goes_on_in_the_next_store_when_its_own_has_ended() -> None:
    """Items that were submitted to the former store are submitted again."""
    places = [Features("shapes", where="pool", num_workers=1) for _ in range(2)]
    addresses = [str(place.address) for place in places]

    def sources() -> Iterator[bytes]:
        for number in range(60):
            if number == 30:
                places[0].close()
                del addresses[0]
            yield png(number)

    with Features("shapes", where=lambda: addresses[0]) as features:
        made = list(features.make_many(sources(), in_flight=8))
        assert [red(each) for each in made] == list(range(60))
        assert features.address == places[1].address
    places[1].close()


def test_items_of_one_batch_wait_for_a_store_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the time for a restart is over, no further item waits for it."""
    monkeypatch.setattr(item_routes, "RETRIED_FOR_S", 0.5)
    pauses: list[float] = []
    monkeypatch.setattr(item_routes, "RETRY_S", 0.1)
    sleep = item_routes.time.sleep
    monkeypatch.setattr(
        item_routes.time, "sleep", lambda pause_s: (pauses.append(pause_s), sleep(pause_s))
    )
    with Features("shapes", where="pool", num_workers=1) as place:
        features = Features("shapes", where=str(place.address))
        results = features.make_many([png(number) for number in range(20)], in_flight=4)
        first = next(results)
        assert red(first) == 0
    failed = list(results)
    assert len(failed) == 19
    lost = [each for each in failed if isinstance(each, FailedItem)]
    assert all(isinstance(each.error, StoreUnavailable) for each in lost)
    assert len(lost) >= 16
    assert pauses.count(0.1) <= 6
    features.close()


def test_coroutines_of_one_batch_wait_for_a_store_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_routes, "RETRIED_FOR_S", 0.5)

    async def main() -> None:
        with Features("shapes", where="pool", num_workers=1) as place:
            features = AsyncFeatures("shapes", where=str(place.address))
            await features.open()
        start_s = time.monotonic()
        results = [each async for each in features.make_many(map(png, range(40)), in_flight=2)]
        assert time.monotonic() - start_s < 3, "twenty times the wait would be 10 s"
        errors = [each.error for each in results if isinstance(each, FailedItem)]
        assert [type(each) for each in errors] == [StoreUnavailable] * 40
        await features.close()

    asyncio.run(main())
