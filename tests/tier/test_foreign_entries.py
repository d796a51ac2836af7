"""Entries that no node has written, in front of a real tier process.

The tests limit the memory and the time that such entries cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from afferent.runtime import process
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.tier.launch import FETCHED, NAME, TIER, TierSettings
from afferent.tier.registry import open_tier
from afferent.tier.sealed import Sealer
from afferent.tier.vault import Body, Vault
from afferent.types import GiB, MiB, ObjectKind
from tests.tier.servers import RedisServer
from tests.tier.test_node import SHARES, Node, body_of, new_key, stages, until
from tests.waiting import until as until_within

LONGEST = 1 << 44
MOST_GROWTH_NBYTES = 300 * MiB
RECOVERY_S = 30.0
NUM_AT_ONCE = 8
TIMEOUT_S = 1.0

Poison = Callable[[bytes], None]
"""Writes an invalid entry under the name of a value."""


@contextlib.asynccontextmanager
async def tier_process(url: str) -> AsyncIterator[tuple[Node, psutil.Process]]:
    """Run a store, a worker, and a tier process."""
    with StoreServer(64 * MiB, shares=SHARES) as server:
        settings = TierSettings(
            store_address=server.address,
            url=url,
            secret="",
            timeout_s=TIMEOUT_S,
            wait_s=1.0,
            ttl_s=600.0,
            max_nbytes=64 * MiB,
            write_nbytes_per_s=0,
        )
        log = process.LogSettings(level="error", format="text")
        child = process.spawn(NAME, TIER, settings, log=log)
        try:
            store = await AsyncDaemonStore.connect(server.address, name="frontend", writable=True)
            worker = await AsyncDaemonStore.connect(server.address, name="worker", writable=True)
            vault = Vault(open_tier(url), Sealer())
            node = Node("node", store, worker, vault)
            task = asyncio.create_task(node.work())
            try:
                yield node, psutil.Process(child.pid)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                vault.close()
                await store.close()
                await worker.close()
        finally:
            child.popen.kill()
            child.popen.wait()
            child.close()


def peak_nbytes(of: psutil.Process) -> int:
    lines = Path(f"/proc/{of.pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


async def comes_from_the_tier(node: Node) -> bool:
    """Return whether the value of another node is fetched."""
    key = new_key()
    body = Body(key, ObjectKind.FEATURES, body_of(key))
    await asyncio.to_thread(node.vault.put, [body], ttl_s=60.0, deadline_s=time.monotonic() + 20.0)
    (outcome,) = await node.want(key)
    return stages(outcome) == [FETCHED]


async def check_entries(url: str, poisons: list[Poison], end: Callable[[], None]) -> None:
    """Request keys with invalid entries: all items are made here.

    The tier process works again soon after ``end``.
    """
    async with tier_process(url) as (node, of_tier):
        await until(lambda: comes_from_the_tier(node))
        before, start_s = peak_nbytes(of_tier), time.monotonic()
        num_made = len(node.made)
        for poison in poisons:
            keys = [new_key() for _ in range(NUM_AT_ONCE)]
            for key in keys:
                await asyncio.to_thread(poison, node.vault.name_of(key))
            await node.want(*keys)
        took_s = time.monotonic() - start_s
        assert len(node.made) == num_made + NUM_AT_ONCE * len(poisons), "none is fetched"
        end()
        start_s = time.monotonic()
        await until_within(lambda: comes_from_the_tier(node), limit_s=RECOVERY_S)
        recovered_s = time.monotonic() - start_s
        assert of_tier.is_running()
        grown = peak_nbytes(of_tier) - before
        print(f"peak + {grown / MiB:.0f} MiB, {took_s:.1f} s, recovered in {recovered_s:.1f} s")
        assert grown <= MOST_GROWTH_NBYTES


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer("--maxmemory", "3gb") as server:
        yield server


def key_of(name: bytes, part: str) -> bytes:
    return b"afferent:{%s}:%s" % (name.hex().encode(), part.encode())


@pytest.mark.timeout(120)
def test_redis_foreign_entries_take_little_memory_and_time(server: RedisServer) -> None:
    with server.client() as client:

        def nine_bytes(name: bytes) -> None:
            client.set(key_of(name, "head"), struct.pack("<QB", LONGEST, 1))

        def longest_allowed(name: bytes) -> None:
            client.set(key_of(name, "head"), struct.pack("<QB", 4 * GiB, 1))

        def short(name: bytes) -> None:
            client.set(key_of(name, "head"), b"abc")

        def huge(name: bytes) -> None:
            client.setrange(key_of(name, "head"), 100 * MiB, b"x")

        def another_type(name: bytes) -> None:
            client.rpush(key_of(name, "head"), b"x")

        poisons = [nine_bytes, longest_allowed, short, huge, another_type]
        asyncio.run(check_entries(server.url, poisons, client.flushall))


@pytest.mark.timeout(120)
def test_redis_foreign_parts_take_little_memory_and_time(server: RedisServer) -> None:
    """The header is valid; the parts that it describes are missing or much longer."""
    with server.client() as client:

        async def main() -> None:
            async with tier_process(server.url) as (node, of_tier):
                await until(lambda: comes_from_the_tier(node))
                before = peak_nbytes(of_tier)
                for poison in (
                    lambda key: client.setrange(key, 100 * MiB, b"x"),
                    lambda key: client.setrange(key, 3, b"x"),
                    lambda key: client.delete(key) and client.rpush(key, b"x"),
                ):
                    keys = [new_key() for _ in range(4)]
                    for key in keys:
                        body = Body(key, ObjectKind.FEATURES, body_of(key))
                        node.vault.put([body], ttl_s=60.0, deadline_s=time.monotonic() + 20.0)
                        poison(key_of(node.vault.name_of(key), "1"))
                    num_made = len(node.made)
                    await node.want(*keys)
                    assert len(node.made) == num_made + len(keys)
                await until_within(lambda: comes_from_the_tier(node), limit_s=RECOVERY_S)
                assert peak_nbytes(of_tier) - before <= MOST_GROWTH_NBYTES

        asyncio.run(main())


@pytest.mark.timeout(120)
def test_folder_foreign_entries_take_little_memory_and_time(tmp_path: Path) -> None:
    root = tmp_path / "tier"

    def path_of(name: bytes) -> Path:
        path = root / name.hex()[:2] / name.hex()
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def pipe(name: bytes) -> None:
        os.mkfifo(path_of(name))

    def sparse(name: bytes) -> None:
        with path_of(name).open("wb") as file:
            file.write(start(4 * GiB, 100))
            file.truncate(4 * GiB + 120)

    def sparse_without_a_start(name: bytes) -> None:
        with path_of(name).open("wb") as file:
            file.truncate(1 << 40)

    def nine_bytes(name: bytes) -> None:
        path_of(name).write_bytes(struct.pack("<QB", LONGEST, 1))

    def longest(name: bytes) -> None:
        path_of(name).write_bytes(start(LONGEST, 1 << 31))

    def device(name: bytes) -> None:
        path_of(name).symlink_to("/dev/zero")

    def folder(name: bytes) -> None:
        (path_of(name) / "more").mkdir(parents=True)

    def start(nbytes: int, head_nbytes: int) -> bytes:
        return struct.pack("<QQI", int(time.time()) + 600, nbytes, head_nbytes)

    def end() -> None:
        for path in root.rglob("*"):
            if path.is_fifo():
                path.unlink()

    poisons = [pipe, sparse, sparse_without_a_start, nine_bytes, longest, device, folder]
    asyncio.run(check_entries(f"file://{root}", poisons, end))
