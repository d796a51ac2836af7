"""Log of a live session in the store: what is missing, two connections, and cancelled writes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from afferent.builtin.pipeline import live_log
from afferent.builtin.pipeline.live_log import CHUNK_CHANGES, LiveLog
from afferent.builtin.pipeline.live_session import Added, LiveItem
from afferent.builtin.pipeline.request import Message, TextPart
from afferent.builtin.pipeline.stored_turns import Turn
from afferent.errors import InvalidRequest, SessionNotFound
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.types import ObjectKind

SESSION = "s"


def added(number: int, text: str = "hello") -> Added:
    turn = Turn.of(Message("user", (TextPart(text),)), iter(()))
    return Added(LiveItem(f"item_{number}", turn, float(number), 3))


@contextlib.asynccontextmanager
async def store_at(address: str) -> AsyncIterator[AsyncDaemonStore]:
    async with await AsyncDaemonStore.connect(address, name="writer", writable=True) as store:
        yield store


async def written(store: AsyncDaemonStore, number: int) -> LiveLog:
    """Return the log of a new session with so many items."""
    log = LiveLog(store, tenant="", session_id=SESSION, lease="first")
    for each in range(number):
        await log.append(added(each))
    return log


async def resumed(store: AsyncDaemonStore, lease: str) -> LiveLog:
    return await LiveLog.resume(store, tenant="", session_id=SESSION, lease=lease)


async def held_nbytes(store: AsyncDaemonStore) -> int:
    return (await store.stat()).kinds[ObjectKind.RECORDS].held_nbytes


@pytest.mark.parametrize("gap", [0, 1, 4])
def test_session_with_an_evicted_change_is_not_found(store_address: str, gap: int) -> None:
    """It was continued up to the gap, and the first new change hit an old one."""

    async def main() -> None:
        async with store_at(store_address) as store:
            log = await written(store, 6)
            log.close()
            await store.delete([log._change_key(gap)])
            with pytest.raises(SessionNotFound, match="evicted"):
                await resumed(store, "second")
            assert await held_nbytes(store) == 0

    asyncio.run(main())


def test_connection_that_ends_leaves_the_pins_of_the_next_one(store_address: str) -> None:
    async def main() -> None:
        async with store_at(store_address) as store:
            old = await written(store, 5)
            new = await resumed(store, "second")
            old.close()
            assert await held_nbytes(store) > 0
            await new.append(added(5))
            new.close()
            assert await held_nbytes(store) == 0
            assert len((await resumed(store, "third")).session) == 6

    asyncio.run(main())


def test_head_of_an_open_session_is_pinned(store_address: str) -> None:
    async def main() -> None:
        async with store_at(store_address) as store:
            for lease, number in (("first", CHUNK_CHANGES), ("second", 0)):
                log = await written(store, number) if number else await resumed(store, lease)
                before = await held_nbytes(store)
                handle = log._head_handle
                assert handle is not None
                await store.release(lease, [handle])
                assert await held_nbytes(store) < before, "it was not pinned"
                log.close()
            assert await held_nbytes(store) == 0

    asyncio.run(main())


def test_cancelled_write_is_whole_and_written_once(store_address: str) -> None:
    async def main() -> None:
        async with store_at(store_address) as store:
            log = await written(store, 0)
            for number in range(12):
                writing = asyncio.create_task(log.append(added(number)))
                for _ in range(number):
                    await asyncio.sleep(0)
                writing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await writing
                await log.append(added(number))  # as the end of a cancelled answer does
            expected = [f"item_{number}" for number in range(12)]
            assert [item.id for item in log.session] == expected
            log.close()
            again = await resumed(store, "second")
            assert [item.id for item in again.session] == expected
            again.close()

    asyncio.run(main())


def test_changes_that_are_not_joined_have_a_limit(
    store_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_log, "_MAX_UNJOINED_NBYTES", 40_000)

    async def main() -> None:
        async with store_at(store_address) as store:
            log = await written(store, 0)
            for number in range(4):
                await log.append(added(number, "a" * 9_000))
            with pytest.raises(InvalidRequest, match="too many bytes"):
                await log.append(added(4, "a" * 9_000))
            assert len(log.session) == 4
            log.close()

    asyncio.run(main())
