"""``/metrics`` shows the metrics of all processes, and nothing without the daemon."""

from __future__ import annotations

import asyncio

import httpx2 as httpx

from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.store.state.region import DEFAULT_SHARES
from afferent.telemetry.registry import Registry
from afferent.types import MiB
from tests.builtin.frontends import frontend


async def page(client: httpx.AsyncClient) -> list[str]:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return answer.text.splitlines()


def test_a_metric_that_no_frontend_has_heard_of() -> None:
    """Metrics of another process, such as an engine, are shown; its counters outlive it."""

    async def main() -> None:
        with StoreServer(32 * MiB, shares=DEFAULT_SHARES) as server:
            registry = Registry()
            drafts = registry.counter("my_engine_drafts_total", "Drafted", outcome=("kept",))
            drafts.labels("kept").inc(3)
            registry.gauge("my_engine_drafting", "Now").labels().set(2)
            engine = await AsyncDaemonStore.connect(server.address, name="engine")
            await engine.push_metrics(registry.source, registry.readings())
            async with frontend(server.address) as client:
                lines = await page(client)
                assert "# HELP my_engine_drafts_total Drafted" in lines
                assert "# TYPE my_engine_drafts_total counter" in lines
                assert 'my_engine_drafts_total{outcome="kept"} 3.0' in lines
                assert "my_engine_drafting 2.0" in lines
                assert "afferent_store_clients 2.0" in lines
                await engine.close()
                lines = await page(client)
                assert 'my_engine_drafts_total{outcome="kept"} 3.0' in lines
                assert "my_engine_drafting 2.0" not in lines

    asyncio.run(main())


def test_without_a_daemon_there_is_no_page() -> None:
    """The counters of one process alone would look like a reset."""

    async def main() -> None:
        with StoreServer(32 * MiB, shares=DEFAULT_SHARES) as server:
            entered = frontend(server.address)
            client = await entered.__aenter__()
            assert "afferent_requests_in_flight 0.0" in await page(client)
        try:
            assert (await client.get("/metrics")).status_code == 503
        finally:
            await entered.__aexit__(None, None, None)

    asyncio.run(main())
