"""Two nodes with a store each, and one tier with all faults that a tier may have.

The stores are real; the tier is in this process, so that tests can control its faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from afferent.admission.shares import Share
from afferent.store.block import codec
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.items import Claim, Fetch, Find, Queue, SealItem
from afferent.store.protocol.results import Absent, Hit, Outcome, Scheduled, existing, spans_of
from afferent.tier.launch import ASKED, FETCHED, TierSettings
from afferent.tier.main import serve
from afferent.tier.protocol import Value
from afferent.tier.sealed import Sealer
from afferent.tier.vault import REJECTED, Vault
from afferent.types import ContentKey, MiB, ObjectKind
from tests import waiting
from tests.store.outcomes import handle_of, states
from tests.tier.lying import Fault, Lying, dies, fails, hangs, is_slow

TIMEOUT_S, WAIT_S = 0.3, 1.0
DEAR_US, CHEAP_US = 30_000_000, 1
NUM_NUMBERS = 300_000
SHARES = {
    ObjectKind.FEATURES: 0.6,
    ObjectKind.EMBEDDINGS: 0.2,
    ObjectKind.RAW: 0.15,
    ObjectKind.RECORDS: 0.05,
}
SOON_S = 20.0
until = partial(waiting.until, limit_s=SOON_S)

_numbers = itertools.count(1)


def new_key() -> ContentKey:
    return ContentKey(next(_numbers).to_bytes(32, "little"))


def tree_of(key: ContentKey) -> dict[str, Any]:
    """Return the features that every node makes for a key."""
    number = int.from_bytes(key, "little")
    return {"values": np.arange(NUM_NUMBERS, dtype=np.float32) * number}


def body_of(key: ContentKey) -> memoryview:
    """Return the same features as a block."""
    tree = tree_of(key)
    block = memoryview(bytearray(codec.plan(tree).nbytes))
    codec.write_into(tree, block)
    return block


@dataclass(eq=False)
class Node:
    """A node: a frontend, a worker, and the thread for the tier."""

    name: str
    store: AsyncDaemonStore
    worker: AsyncDaemonStore
    vault: Vault
    made: list[ContentKey] = field(default_factory=list)
    make_s: float = 0.05
    """Longer than a fetch over the slowest link; else the features would not be written."""
    _requests: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    async def work(self) -> None:
        while True:
            order = await self.worker.take()
            key = ContentKey(order.payload)
            self.made.append(key)
            await asyncio.sleep(self.make_s)
            nbytes = codec.write_into(tree_of(key), self.worker.block(order.target))
            await self.worker.finish(order, used_nbytes=nbytes)

    async def want(self, *keys: ContentKey, cost_us: int = DEAR_US) -> list[Outcome]:
        """Acquire all keys as a request does; check the features, and unpin them."""
        request = f"request-{next(self._requests)}"
        nbytes = codec.plan(tree_of(keys[0])).nbytes
        items = [Queue(key, ObjectKind.FEATURES, nbytes, [], bytes(key), cost_us) for key in keys]
        outcomes = await self.store.acquire(request, items)
        pending = [key for key, one in zip(keys, outcomes, strict=True) if not isinstance(one, Hit)]
        if pending:
            waited = await self.store.wait(request, pending, timeout_s=SOON_S)
            found = dict(zip(pending, waited, strict=True))
            outcomes = [found.get(key, one) for key, one in zip(keys, outcomes, strict=True)]
        for key, outcome in zip(keys, outcomes, strict=True):
            tree: Any = codec.view(self.store.block(handle_of(outcome)), copy=True)
            assert (tree["values"] == tree_of(key)["values"]).all(), "a wrong byte"
        await self.store.release(request)
        return outcomes

    async def held_nbytes(self) -> int:
        statistics = await self.store.stat()
        return statistics.held_nbytes + statistics.reserved_nbytes


@contextlib.asynccontextmanager
async def node(name: str, address: str, tier: Lying, **settings: Any) -> AsyncIterator[Node]:
    store = await AsyncDaemonStore.connect(address, name=f"{name} frontend", writable=True)
    worker = await AsyncDaemonStore.connect(address, name=f"{name} worker", writable=True)
    beyond = await AsyncDaemonStore.connect(address, name=f"{name} tier", writable=True)
    vault = Vault(tier, Sealer(b"a secret of the fleet"))
    one = Node(name, store, worker, vault)
    given = {
        "store_address": address,
        "url": "",
        "secret": "",
        "timeout_s": TIMEOUT_S,
        "wait_s": WAIT_S,
        "ttl_s": 60.0,
        "max_nbytes": 64 * MiB,
        "write_nbytes_per_s": 0,
    }
    tasks = [
        asyncio.create_task(one.work()),
        asyncio.create_task(serve(beyond, vault, TierSettings(**{**given, **settings}))),
    ]
    try:
        yield one
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        for each in (store, worker, beyond):
            await each.close()
        vault.close()
        unexpected = [end for end in ends if not isinstance(end, asyncio.CancelledError)]
        assert unexpected == [], "what talks to the tier has ended"


@pytest.fixture(scope="module")
def addresses() -> Iterator[tuple[str, str]]:
    with StoreServer(64 * MiB, shares=SHARES) as one, StoreServer(64 * MiB, shares=SHARES) as two:
        yield one.address, two.address


Scenario = Callable[[Node, Node, Lying], Coroutine[Any, Any, None]]
Play = Callable[..., None]


@pytest.fixture
def play(addresses: tuple[str, str]) -> Play:
    """Run a scenario with two nodes that have contacted the tier."""

    def run(scenario: Scenario, **settings: Any) -> None:
        async def main() -> None:
            tier = Lying()
            async with (
                node("one", addresses[0], tier, **settings) as one,
                node("two", addresses[1], tier, **settings) as two,
            ):
                await until(lambda: len(tier.calls) >= 2)
                await asyncio.sleep(0.05)  # both wait for a task now
                await scenario(one, two, tier)

        asyncio.run(main())

    return run


def stages(outcome: Outcome) -> list[str]:
    return [span.stage for span in spans_of(outcome)]


async def make_and_keep(one: Node, tier: Lying, number: int = 1) -> list[ContentKey]:
    keys, before = [new_key() for _ in range(number)], len(tier.values)
    await one.want(*keys)
    await until(lambda: len(tier.values) >= before + number)
    return keys


def test_what_one_has_made_the_other_fetches(play: Play) -> None:
    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        (key,) = await make_and_keep(one, tier)
        (fetched,) = await two.want(key)
        assert (one.made, two.made) == ([key], [])
        assert stages(fetched) == [FETCHED]
        assert "make" in spans_of(fetched)[0].note
        (hit,) = await two.want(key)
        assert isinstance(hit, Hit)

    play(scenario)


def test_a_request_asks_for_all_of_its_keys_at_once(play: Play) -> None:
    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        keys = await make_and_keep(one, tier, 5)
        tier.calls.clear()
        await two.want(*keys, *[new_key() for _ in range(5)])
        # At most 4 for the request, 5 before the new values are written, and 1 to measure the link.
        calls = {what: tier.calls.count(what) for what in ("look-up", "claim", "fetch")}
        assert calls["look-up"] <= 4 + 5 + 1, calls
        assert calls["claim"] <= 4, calls
        assert calls["fetch"] <= 4, calls
        assert len(two.made) == 5, "what was kept is fetched"

    play(scenario)


def test_what_is_absent_is_made_and_the_trace_says_so(play: Play) -> None:
    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        (made,) = await two.want(new_key())
        assert stages(made) == [ASKED]
        assert made.spans[0].note.startswith("absent")
        assert len(two.made) == 1

    play(scenario)


def test_what_is_cheap_to_make_is_not_asked_for(play: Play) -> None:
    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        (key,) = await make_and_keep(one, tier)
        tier.calls.clear()
        (made,) = await two.want(key, cost_us=CHEAP_US)
        assert two.made == [key]
        assert "fetch" not in tier.calls
        assert made.spans[0].note.startswith("not asked")

    play(scenario)


def test_both_want_it_and_one_makes_it(play: Play) -> None:
    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        key = new_key()
        one.make_s = two.make_s = 0.2
        await asyncio.gather(one.want(key), two.want(key))
        assert one.made + two.made == [key]

    play(scenario)


def test_a_maker_that_never_ends_is_waited_for_so_long_and_no_longer(play: Play) -> None:
    """The lease of a dead node delays the others only for a limited time."""

    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        key, start_s = new_key(), time.monotonic()
        name = two.vault.name_of(key)
        tier.claims[name] = (b"a dead node", start_s + 60.0)
        await two.want(key)
        assert two.made == [key]
        took_s = time.monotonic() - start_s
        assert 0.5 < took_s < WAIT_S + 2 * TIMEOUT_S + 3.0

    play(scenario)


def test_a_claim_that_ends_is_taken_over(play: Play) -> None:
    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        key, start_s = new_key(), time.monotonic()
        name = two.vault.name_of(key)
        tier.claims[name] = (b"a dead node", start_s + 0.1)
        await two.want(key)
        assert two.made == [key]
        await until(lambda: name in tier.values)
        await until(lambda: name not in tier.claims)

    play(scenario)


FAULTS = {"dies": dies, "hangs": hangs, "is slow": is_slow, "fails": fails}


@pytest.mark.parametrize("what", ["look-up", "fetch", "write-behind", "claim", "release"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_no_fault_fails_a_request_or_leaks(play: Play, what: str, fault: Fault) -> None:
    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        keys = await make_and_keep(one, tier, 2)
        tier.faults[what] = fault
        for key in (*keys, *[new_key() for _ in range(4)]):
            start_s = time.monotonic()
            await two.want(key)
            assert time.monotonic() - start_s < 2 * WAIT_S + 4 * TIMEOUT_S + 3.0
        tier.faults.clear()

        async def is_let_go() -> bool:
            return await two.held_nbytes() == 0

        await until(is_let_go)

        async def is_used_again() -> bool:
            """Return whether the tier is used again, after a probe and a slow operation."""
            (key,) = await make_and_keep(one, tier)
            await two.want(key)
            return key not in two.made

        await until(is_used_again)

    play(scenario)


@pytest.mark.parametrize("then", ["claim", "fetch"])
def test_a_tier_that_hangs_midway_costs_one_time_out(play: Play, then: str) -> None:
    """All operations for an object share one timeout, most of which the lookup has used."""

    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        (key,) = await make_and_keep(one, tier) if then == "fetch" else (new_key(),)
        tier.faults |= {"look-up": takes_most_of_it, then: hangs}
        start_s = time.monotonic()
        await two.want(key, cost_us=9_000_000)
        assert time.monotonic() - start_s < 5.0, "two time-outs take 5.7 s"
        assert then in tier.calls
        tier.faults.clear()

    def takes_most_of_it(deadline_s: float) -> None:
        time.sleep(max(0.0, deadline_s - time.monotonic() - 0.3))

    play(scenario, timeout_s=3.0, wait_s=4.0)


def test_what_waits_for_an_exchange_waits_one_time_out(play: Play) -> None:
    """A task that waits for hanging operations does not begin its own when it is late."""

    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        tier.faults["look-up"] = hangs

        async def want() -> float:
            start_s = time.monotonic()
            await two.want(new_key())
            return time.monotonic() - start_s

        tasks = []
        for _ in range(6):
            num_calls = len(tier.calls)
            tasks.append(asyncio.create_task(want()))
            if len(tasks) <= 4:
                await until(lambda: len(tier.calls) > num_calls)  # noqa: B023
        assert max(await asyncio.gather(*tasks)) < 5.0, "two time-outs take 6 s"
        tier.faults.clear()

    play(scenario, timeout_s=3.0)


def test_a_tier_that_is_down_costs_nothing(play: Play) -> None:
    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        tier.faults |= dict.fromkeys(("look-up", "fetch", "write-behind", "claim", "health"), hangs)
        for _ in range(4):
            await two.want(new_key())
        two.make_s = 0.0
        tier.calls.clear()
        made = await two.want(*[new_key() for _ in range(20)])
        assert states(made) == ["made"] * 20
        assert set(tier.calls) <= {"health"}, "no request waits for it, or has it asked"
        tier.faults.clear()

    play(scenario)


@pytest.mark.parametrize("what", ["flipped", "another's", "short", "foreign"])
def test_no_lie_is_believed(play: Play, what: str) -> None:
    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        key, other = await make_and_keep(one, tier, 2)
        name, others = two.vault.name_of(key), two.vault.name_of(other)
        value = tier.values[name]
        match what:
            case "flipped":
                value.body[len(value.body) // 2] ^= 1
            case "another's":
                tier.values[name] = tier.values[others]
            case "short":
                tier.values[name] = Value(name, value.head, value.body[:-64])
            case "foreign":
                head = Sealer(b"another fleet's secret").seal(key, ObjectKind.FEATURES, value.body)
                tier.values[name] = Value(name, head, value.body)
        await two.want(key, other)
        assert two.made == [key]
        await until(lambda: name in tier.values and tier.values[name] is not value)

    play(scenario)


@pytest.mark.parametrize("what", ["head", "body", "block"])
def test_good_values_after_poisoned_ones_are_fetched(play: Play, what: str) -> None:
    """A wrong value is deleted, and changes neither the hit rate nor the rate of the link."""
    sealer, kind = Sealer(b"a secret of the fleet"), ObjectKind.FEATURES
    item = {"cost_us": 60_000}

    def poison(node: Node, tier: Lying, key: ContentKey) -> None:
        name, body = node.vault.name_of(key), body_of(key)
        if what == "block":
            body[:8] = bytes(8)
        head = b"head" if what == "head" else sealer.seal(key, kind, body)
        if what == "body":
            body[-1] ^= 1
        tier.values[name] = Value(name, head, body)

    def take_a_while(_: float) -> None:
        time.sleep(0.005)

    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        tier.faults["look-up"] = take_a_while
        two.make_s = item["cost_us"] / 1e6
        for _ in range(6):
            keys = [new_key() for _ in range(8)]
            for key in keys:
                poison(two, tier, key)
            await two.want(*keys, **item)
            assert set(keys) <= set(two.made)
        before = len(two.made)
        for _ in range(10):
            (key,) = await make_and_keep(one, tier)
            await two.want(key, **item)
        assert len(two.made) - before <= 1

    play(scenario)


def test_what_no_reader_would_take_is_not_sealed_as_features(play: Play) -> None:
    """The value has a valid seal, but no valid block."""

    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        key = new_key()
        (name, body) = two.vault.name_of(key), memoryview(bytearray(b"no block" * 1000))
        head = Sealer(b"a secret of the fleet").seal(key, ObjectKind.FEATURES, body)
        tier.put_many([Value(name, head, body)], ttl_s=60, deadline_s=1e9)
        before, value = REJECTED.labels("body").values[0], tier.values[name]
        await two.want(key)
        assert two.made == [key]
        assert REJECTED.labels("body").values[0] == before + 1
        await until(lambda: name in tier.values and tier.values[name] is not value)

    play(scenario)


def test_what_is_too_large_is_not_kept(play: Play) -> None:
    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        await one.want(new_key())
        await until(lambda: "release" in tier.calls)
        assert tier.values == {}

    play(scenario, max_nbytes=1000)


def test_writing_is_paced_and_nothing_is_pinned_meanwhile(play: Play) -> None:
    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        await one.want(*[new_key() for _ in range(6)])
        await until(lambda: len(tier.values) >= 1)

        async def is_let_go() -> bool:
            return await one.held_nbytes() == 0

        await until(is_let_go)
        assert len(tier.values) < 6

    play(scenario, write_nbytes_per_s=1_000_000)


def test_embeddings_come_by_themselves(play: Play) -> None:
    """An engine requests them; if they are absent, no job is queued."""

    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        key, kind = new_key(), ObjectKind.EMBEDDINGS
        tree = tree_of(key)
        nbytes = codec.plan(tree).nbytes
        asked = Fetch(key, kind, nbytes + 1000, DEAR_US)
        (absent,) = await two.store.acquire("r", [asked])
        assert isinstance(absent, Scheduled)
        (absent,) = await two.store.wait("r", [key])
        assert isinstance(absent, Absent)
        (claim,) = await one.store.acquire("r", [Claim(key, kind, nbytes)])
        assert claim.handle is not None
        codec.write_into(tree, one.store.block(claim.handle))
        await one.store.seal("r", [SealItem(claim.handle, nbytes)])
        await until(lambda: two.vault.name_of(key) in tier.values)
        await two.store.acquire("r", [asked])
        (fetched,) = await two.store.wait("r", [key])
        assert fetched.handle is not None
        assert fetched.handle.nbytes == nbytes
        found: Any = codec.view(two.store.block(fetched.handle), copy=True)
        assert (found["values"] == tree["values"]).all()
        (there,) = await two.store.acquire("r", [Find(key)])
        assert isinstance(there, Hit)
        for each in (one, two):
            await each.store.release("r")

    play(scenario)


async def leave(one: Node, key: ContentKey, kind: ObjectKind, data: bytes, made_us: int) -> None:
    """Store an object as a frontend does that has fetched media."""
    (claim,) = await one.store.acquire("r", [Claim(key, kind, len(data))])
    assert claim.handle is not None
    one.store.block(claim.handle)[: len(data)] = data
    await one.store.seal("r", [SealItem(claim.handle, len(data), [], made_us)])
    await one.store.release("r")


async def find(two: Node, key: ContentKey, kind: ObjectKind, nbytes: int) -> bytes | None:
    await two.store.acquire("r", [Fetch(key, kind, nbytes, DEAR_US)])
    (outcome,) = await two.store.wait("r", [key])
    handle = existing(outcome)
    found = None if handle is None else bytes(two.store.block(handle))
    await two.store.release("r")
    await two.store.delete([key])
    return found


@pytest.mark.parametrize("kind", [ObjectKind.RAW, ObjectKind.RECORDS])
def test_files_and_what_leads_to_them_come_as_they_were(play: Play, kind: ObjectKind) -> None:
    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        key, data = new_key(), b"no block of tensors" * 3
        await leave(one, key, kind, data, DEAR_US)
        await until(lambda: two.vault.name_of(key) in tier.values)
        assert await find(two, key, kind, 4096) == data
        assert await find(two, key, kind, len(data) - 1) is None, "longer than was said"

    play(scenario)


def test_a_record_takes_the_place_of_an_older_one(play: Play) -> None:
    """The target of a URL changes, so it is written again; other objects never change."""

    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        key = new_key()
        name = two.vault.name_of(key)
        for data in (b"first", b"second"):
            await leave(one, key, ObjectKind.RECORDS, data, DEAR_US)
            await until(lambda: name in tier.values and bytes(tier.values[name].body) == data)  # noqa: B023
            await one.store.delete([key])
        assert await find(two, key, ObjectKind.RECORDS, 128) == b"second"

    play(scenario)


def test_what_came_sooner_from_its_host_is_not_kept(play: Play) -> None:
    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        near, far = new_key(), new_key()
        await leave(one, near, ObjectKind.RAW, bytes(500_000), 100)
        await leave(one, far, ObjectKind.RAW, bytes(500_000), DEAR_US)
        await until(lambda: two.vault.name_of(far) in tier.values)
        assert len(tier.values) == 1

    play(scenario)


def test_a_tenant_that_has_its_share_leaves_no_more(play: Play) -> None:
    async def scenario(one: Node, two: Node, tier: Lying) -> None:
        sizes = {"anna": 40_000, "ben": 40_000}
        for tenant in ("anna", "anna", "anna", "ben"):
            one.store.introduce("r", Share(tenant))
            await leave(one, new_key(), ObjectKind.RAW, bytes(sizes[tenant]), DEAR_US)
        await until(lambda: len(tier.values) == 3)
        before = len(tier.values)
        await leave(one, new_key(), ObjectKind.RAW, bytes(100), DEAR_US)  # the last one
        await until(lambda: len(tier.values) == before + 1)
        assert sum(len(value.body) for value in tier.values.values()) == 3 * 40_000 + 100

    play(scenario, tenant_nbytes=80_000)
