"""Tier process: the only process of a node that waits for the tier's network.

python -m afferent.tier.main FD      (started by the supervisor)

It maps the arena like other clients. It fetches into blocks that the store has allocated for
requests, and objects that it copies are pinned meanwhile. If it dies, its fetches are made here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

import uvloop

from afferent.errors import TierUnavailable
from afferent.runtime.process import ChildProcess, run_until_terminated
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.telemetry.pushing import push_counts
from afferent.telemetry.registry import REGISTRY, gauge
from afferent.tier.access import Access
from afferent.tier.claims import HeldClaims
from afferent.tier.costs import CostModel, Limits
from afferent.tier.fetching import Fetcher
from afferent.tier.keeping import Keeper
from afferent.tier.launch import NAME, TierSettings
from afferent.tier.registry import open_tier, without_secrets
from afferent.tier.sealed import Sealer
from afferent.tier.vault import Vault
from afferent.types import KEY_NBYTES, ContentKey

RATE = gauge(
    "afferent_tier_link_bytes_per_second", "What the link to the tier carries, as measured"
)
LOOK_UP = gauge("afferent_tier_look_up_seconds", "What a look-up takes, as measured")
_PERIOD_S = 1.0
_MEASURE_EVERY_S = 3.0
_NOBODYS_KEY = ContentKey(bytes(KEY_NBYTES))


async def _show(model: CostModel) -> None:
    while True:
        RATE.labels().set(model.nbytes_per_s)
        LOOK_UP.labels().set(model.lookup_s)
        await asyncio.sleep(_PERIOD_S)


async def _keep_measuring(access: Access, model: CostModel) -> None:
    """Look up a missing key now and then.

    This notices when a slow link has recovered, which would otherwise be left out for long. It also
    notices an outage before a request waits for it.
    """
    while True:
        await asyncio.sleep(_MEASURE_EVERY_S)
        if access.is_up:
            with contextlib.suppress(TierUnavailable):
                model.looked_up(await access.call(lambda: _time_look_up(access.vault, model)))


def _time_look_up(vault: Vault, model: CostModel) -> float:
    start_s = time.monotonic()
    vault.look_up([_NOBODYS_KEY], deadline_s=start_s + model.limits.timeout_s)
    return time.monotonic() - start_s


async def serve(store: AsyncDaemonStore, vault: Vault, settings: TierSettings) -> None:
    """Fetch and copy for one node, until cancelled."""
    access = Access(vault, timeout_s=settings.timeout_s)
    model = CostModel(Limits(timeout_s=settings.timeout_s, wait_s=settings.wait_s))
    claims = HeldClaims(vault)
    fetcher = Fetcher(store, access, model, claims)
    keeper = Keeper(store, access, model, claims, settings)
    measuring = _keep_measuring(access, model)
    async with asyncio.TaskGroup() as tasks:
        for work in (fetcher.run(), keeper.run(), access.keep_probing(), measuring, _show(model)):
            tasks.create_task(work)


async def _run(child: ChildProcess, settings: TierSettings) -> None:
    REGISTRY.begin_at_zero()
    vault = Vault(open_tier(settings.url), Sealer(settings.secret.encode()))
    store = await AsyncDaemonStore.connect(settings.store_address, name=NAME, writable=True)
    sealed = "sealed with the fleet's secret" if settings.secret else "sealed without a secret"
    child.report(f"{without_secrets(settings.url)}, {sealed}", ready=True)
    await run_until_terminated(
        serve(store, vault, settings), push_counts(store), child.keep_beating()
    )


def main() -> None:
    child = ChildProcess.start()
    uvloop.run(_run(child, child.settings(TierSettings)))
    os._exit(0)  # a thread may wait for a server that does not answer


if __name__ == "__main__":
    main()
