"""Load reports: the engine's values and Afferent's, in the format that a router asks for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from afferent.admission.gate import Gate
from afferent.engines.protocol import EngineStats
from afferent.proxy.load import LoadReports
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.types import MiB, ObjectKind, ReserveItem

ASKED = b"endpoint-load-metrics-format"
GIVEN = b"endpoint-load-metrics"
OF_VLLM = b"TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=3.0"


def report(
    answer: list[tuple[bytes, bytes]], wish: bytes | None, of_engine: EngineStats | None = None
) -> Any:
    async def stats() -> EngineStats | None:
        return of_engine

    async def main() -> list[tuple[bytes, bytes]]:
        with StoreServer(4 * MiB, shares={ObjectKind.FEATURES: 1.0}) as server:
            store = await AsyncDaemonStore.connect(server.address, name="frontend")
            try:
                await store.reserve("r", [ReserveItem(ObjectKind.FEATURES, MiB)], timeout_s=5.0)
                reports = LoadReports(store, Gate(store, timeout_s=1.0), stats)
                asked = [(b"accept", b"*/*")] + ([(ASKED, wish)] if wish is not None else [])
                return (await reports.look(asked)).added_to(answer)
            finally:
                await store.close()

    return asyncio.run(main())


def values(headers: list[tuple[bytes, bytes]]) -> dict[str, float]:
    (found,) = [value.decode() for name, value in headers if name == GIVEN]
    wish, _, text = found.partition(" ")
    if wish == "JSON":
        named: dict[str, float] = json.loads(text)["named_metrics"]
        return named
    assert wish == "TEXT"
    pairs = (part.partition("=") for part in text.split(", "))
    return {name.removeprefix("named_metrics."): float(value) for name, _, value in pairs}


@pytest.mark.parametrize("wish", [b"TEXT", b"json", b" JSON "])
def test_the_values_of_both(wish: bytes) -> None:
    headers = report([(b"content-type", b"application/json"), (GIVEN, OF_VLLM)], wish)
    assert (b"content-type", b"application/json") in headers
    assert values(headers) == {
        "kv_cache_usage_perc": 0.25,
        "num_requests_waiting": 3.0,
        "afferent_predicted_wait_s": 0.0,
        "afferent_arena_free_bytes": 3 * MiB,
    }


def test_an_engine_without_a_report() -> None:
    found = values(report([], b"TEXT", EngineStats(num_running=2, kv_in_use=0.25)))
    assert (found["num_requests_running"], found["kv_cache_usage_perc"]) == (2.0, 0.25)
    assert found["afferent_arena_free_bytes"] == 3 * MiB


@pytest.mark.parametrize("wish", [None, b"", b"XML"])
def test_no_report_without_a_wish(wish: bytes | None) -> None:
    answer = [(b"content-type", b"text/plain"), (GIVEN, OF_VLLM)]
    assert report(answer, wish) == answer


@pytest.mark.parametrize(
    "broken", [b"TEXT", b"JSON {", b"TEXT a=b", b'JSON {"a": 1}', b"\xff", b"TEXT a b=1, c=nan"]
)
def test_a_malformed_report_of_the_engine_is_replaced(broken: bytes) -> None:
    assert set(values(report([(GIVEN, broken)], b"TEXT"))) == {
        "afferent_predicted_wait_s",
        "afferent_arena_free_bytes",
    }


def test_requests_at_once_share_a_report() -> None:
    """The first ones too: none of them gets a report without values."""

    async def main() -> None:
        with StoreServer(4 * MiB, shares={ObjectKind.FEATURES: 1.0}) as server:
            store = await AsyncDaemonStore.connect(server.address, name="frontend")
            try:
                reports = LoadReports(store, Gate(store, timeout_s=1.0))
                found = await asyncio.gather(*(reports.look([(ASKED, b"TEXT")]) for _ in range(5)))
                free = {values(each.added_to([]))["afferent_arena_free_bytes"] for each in found}
                assert free == {4 * MiB}
            finally:
                await store.close()

    asyncio.run(main())
