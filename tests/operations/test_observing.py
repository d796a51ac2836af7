"""Frontends and a real store, observed by the process of the live page."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from afferent.engines.protocol import EngineStats
from afferent.engines.upstream import UpstreamStats
from afferent.operations.live_page.feed import MAX_VIEWERS, Feed
from afferent.operations.live_page.observing import Observer
from afferent.operations.live_page.view import View
from afferent.proxy.reports import SOCKET_NAME, Reports, reports_place
from afferent.runtime import wire
from afferent.runtime.sockets import addresses_in
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.store.state.region import DEFAULT_SHARES
from afferent.telemetry.journal import Journal
from afferent.types import MiB, ObjectKind, ReserveItem
from tests.operations.seen import in_loop, journal

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def store() -> Iterator[StoreServer]:
    with StoreServer(16 * MiB, shares=DEFAULT_SHARES) as server:
        yield server


@contextlib.asynccontextmanager
async def frontend(
    folder: Path,
    store: StoreServer,
    told: Journal,
    *,
    stats: EngineStats | UpstreamStats | None = None,
) -> AsyncIterator[None]:
    async def engine() -> EngineStats | UpstreamStats | None:
        return stats

    reports = Reports("frontend-0", "shapes", store.address, engine, told)
    with reports_place(folder) as listener:
        serving = asyncio.create_task(reports.serve(listener))
        try:
            yield
        finally:
            serving.cancel()
            await asyncio.wait([serving])


@contextlib.asynccontextmanager
async def observing(folder: Path) -> AsyncIterator[Observer]:
    observer = Observer(folder, name="watcher")
    try:
        yield observer
    finally:
        await observer.close()


@pytest.mark.parametrize(
    "stats",
    [
        EngineStats(1, 2, 3),
        UpstreamStats(
            num_running=1, num_waiting=2, kv_in_use=0.1, num_prompt_tokens=3, num_tokens=4
        ),
    ],
)
@in_loop
async def test_a_store_and_its_frontends_are_seen(
    store: StoreServer, tmp_path: Path, stats: EngineStats | UpstreamStats
) -> None:
    with DaemonStore(store.address, name="holder") as holder:
        holder.reserve("r", [ReserveItem(ObjectKind.RAW, MiB)])
        async with (
            frontend(tmp_path, store, journal("ok", ""), stats=stats),
            frontend(tmp_path, store, journal("ok"), stats=stats),
            observing(tmp_path) as observer,
        ):
            seen = await observer.observe()
            again = await observer.observe()
    assert [report.num_running for report in seen.frontends].count(1) == 1
    assert [report.engine or report.upstream for report in seen.frontends] == [stats, None], (
        "one engine for all"
    )
    assert seen.statistics is not None
    assert seen.statistics.reserved_nbytes == MiB
    assert seen.statistics.num_clients == 1, "who looks is not among those who are seen"
    assert [client.name for client in seen.lists.clients] == ["holder"]
    assert [(each.tenant, each.reserved_nbytes) for each in seen.tenants] == [("", MiB)]
    assert again.lists is seen.lists, "lists are dear, and not taken at every look"
    assert addresses_in(tmp_path, SOCKET_NAME) == []


@in_loop
async def test_who_was_killed_is_missing_and_the_others_are_seen(
    store: StoreServer, tmp_path: Path
) -> None:
    async with frontend(tmp_path, store, journal("ok")), observing(tmp_path) as observer:
        async with frontend(tmp_path, store, journal("ok")):
            assert len((await observer.observe()).frontends) == 2
        left = tmp_path / f"{SOCKET_NAME}-00000000.sock"
        left.touch()
        assert len((await observer.observe()).frontends) == 1


@in_loop
async def test_statistics_of_the_engine_outlast_a_killed_frontend(
    store: StoreServer, tmp_path: Path
) -> None:
    stats = EngineStats(1, 2, 3)
    (tmp_path / f"{SOCKET_NAME}-00000000.sock").touch()  # the first address, of a dead process
    async with (
        frontend(tmp_path, store, journal("ok"), stats=stats),
        observing(tmp_path) as observer,
    ):
        await observer.observe()
        for _ in range(2):
            (answer,) = (await observer.observe()).frontends
            assert answer.engine == stats


@in_loop
async def test_a_frontend_that_hangs_is_not_waited_for_long(
    store: StoreServer, tmp_path: Path
) -> None:
    hanging = wire.listen(str(tmp_path / f"{SOCKET_NAME}-00000000.sock"))  # nothing accepts
    with hanging:
        async with frontend(tmp_path, store, journal("ok")), observing(tmp_path) as observer:
            seen = await observer.observe()
            assert (len(seen.frontends), seen.statistics is not None) == (1, True)


@in_loop
async def test_a_server_that_is_not_there_is_seen_as_such(tmp_path: Path) -> None:
    async with observing(tmp_path) as observer:
        seen = await observer.observe()
    assert (list(seen.frontends), seen.statistics) == ([], None)


@pytest.mark.parametrize("said", [b"\n", b"{}x\n", b'{"of_engine": 3}\n', b"x" * 5000])
@in_loop
async def test_what_is_no_question_ends_the_connection(
    store: StoreServer, tmp_path: Path, said: bytes
) -> None:
    async with frontend(tmp_path, store, journal("ok")), observing(tmp_path) as observer:
        (address,) = addresses_in(tmp_path, SOCKET_NAME)
        reader, writer = await asyncio.open_unix_connection(address)
        writer.write(said)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        assert len((await observer.observe()).frontends) == 1


# The feed


@in_loop
async def test_all_who_look_see_the_same_and_then_nobody_is_asked(
    store: StoreServer, tmp_path: Path
) -> None:
    with DaemonStore(store.address, name="other") as other:
        async with frontend(tmp_path, store, journal("ok", "")):
            feed = Feed(Observer(tmp_path, name="page"))
            first, second = feed.views(), feed.views()
            raw = await anext(first)
            seen = msgspec.json.decode(raw, type=View)
            assert (seen.model, seen.num_running, seen.problem) == ("shapes", 1, "")
            assert await anext(second) == raw
            assert {client.name for client in other.list_clients()} == {"other", "page"}
            await first.aclose()
            assert msgspec.json.decode(await anext(second), type=View).over_s > 0
            await second.aclose()
            assert feed.num_viewers == 0
            async with asyncio.timeout(10):
                while len(other.list_clients()) > 1:
                    await asyncio.sleep(0.02)
            await feed.close()


@in_loop
async def test_a_feed_that_ends_ends_what_is_read_from_it(tmp_path: Path) -> None:
    feed = Feed(Observer(tmp_path, name="page"))
    views = feed.views()
    seen = msgspec.json.decode(await anext(views), type=View)
    assert seen.problem == "no frontend answers"
    waiting = asyncio.ensure_future(anext(views, None))
    await asyncio.sleep(0)
    await feed.close()
    assert await waiting is None


@in_loop
async def test_so_many_may_look(tmp_path: Path) -> None:
    feed = Feed(Observer(tmp_path, name="page"))
    views = [feed.views() for _ in range(MAX_VIEWERS)]
    await asyncio.gather(*map(anext, views))
    assert feed.is_full
    await views[0].aclose()
    assert not feed.is_full
    await feed.close()
