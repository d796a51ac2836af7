"""Write-behind of a node: it copies new objects to its tier; no request waits for it.

The store gives it objects (`Take` of the role ``keep``), each pinned. At most `NUM_AT_ONCE` are
copied at a time, and none while the tier is down: then they are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter

import msgspec

from afferent.errors import AfferentError, TierUnavailable, Unavailable
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.results import Keeping, Order
from afferent.telemetry.registry import counter
from afferent.tier.access import Access
from afferent.tier.claims import HeldClaims
from afferent.tier.costs import CostModel
from afferent.tier.fetching import SECONDS
from afferent.tier.launch import TierSettings
from afferent.tier.tenants import TenantBudget
from afferent.tier.vault import Body
from afferent.types import ContentKey, ObjectKind, decode

log = logging.getLogger(__name__)

KEPT = counter(
    "afferent_tier_kept_total",
    "Objects made here, by what became of them: kept, full (no room there), left_out by their cost "
    "or size, over_quota of their tenant, dropped under pressure, or unavailable",
    outcome=("kept", "full", "left_out", "over_quota", "dropped", "unavailable"),
)
KEPT_BYTES = counter("afferent_tier_kept_bytes_total", "Bytes that went to the tier")

NUM_AT_ONCE = 2
_LEAST_NBYTES_PER_S = 4e6
"""A slower link counts as hanging."""
_TAKE_AGAIN_S = 0.05

_keeping_decoder = msgspec.msgpack.Decoder(Keeping)


class Keeper:
    """Copies objects to the tier until cancelled.

    Invariants:
        - Each object is pinned only while it is copied.
    """

    def __init__(
        self,
        store: AsyncDaemonStore,
        access: Access,
        model: CostModel,
        claims: HeldClaims,
        settings: TierSettings,
    ) -> None:
        self._store, self._access, self._model = store, access, model
        self._claims, self._settings = claims, settings
        self._budget = TenantBudget(
            settings.tenant_nbytes, ttl_s=settings.ttl_s, own=settings.nbytes_by_tenant
        )
        self._writing: Counter[str] = Counter()
        """Bytes that are being written for each tenant, which may not be in the budget yet."""
        self._free_at_s = 0.0

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_AT_ONCE):
                tasks.create_task(self._keep_all())

    async def _keep_all(self) -> None:
        while True:
            await self._access.until_up()
            await self._pace()  # before there is a pin
            try:
                order = await self._store.take("keep")
            except Unavailable:
                await asyncio.sleep(_TAKE_AGAIN_S)
                continue
            keeping = decode(_keeping_decoder, order.payload)
            try:
                await self._keep(order, keeping)
            except AfferentError as error:
                log.info("an object was not kept", extra={"reason": error.message})
            finally:
                self._store.forget(keeping.request)

    async def _keep(self, order: Order, what: Keeping) -> None:
        KEPT.labels("dropped").inc(what.num_dropped)
        nbytes = order.target.nbytes
        self._model.made(what.kind, nbytes=nbytes, expected_us=what.cost_us, took_us=what.made_us)
        wanted = self._choose(what, nbytes)
        writing = nbytes if wanted == "kept" else 0
        self._writing[what.tenant] += writing
        try:
            outcome = await self._access.call(lambda: self._settle(order, what, wanted))
        except TierUnavailable:
            outcome = "unavailable"
        finally:
            self._writing[what.tenant] -= writing
            if not self._writing[what.tenant]:
                del self._writing[what.tenant]
        KEPT.labels(outcome).inc()
        if outcome == "kept":
            KEPT_BYTES.labels().inc(nbytes)
            self._budget.add(what.tenant, nbytes, now_s=time.monotonic())

    def _choose(self, what: Keeping, nbytes: int) -> str:
        """Return the planned outcome for an object."""
        pays = self._model.keeps(what.kind, nbytes=nbytes, made_us=what.made_us)
        if not pays or nbytes > self._settings.max_nbytes:
            return "left_out"
        written = nbytes + self._writing[what.tenant]
        has_room = self._budget.has_room(what.tenant, written, now_s=time.monotonic())
        return "kept" if has_room else "over_quota"

    # In a thread

    def _settle(self, order: Order, what: Keeping, wanted: str) -> str:
        """Carry out the plan and return the outcome; other nodes need not wait any more."""
        outcome = self._write(order, what) if wanted == "kept" else wanted
        self._claims.give_back(ContentKey(what.key), self._settings.timeout_s)
        return outcome

    def _write(self, order: Order, what: Keeping) -> str:
        start_s, data = time.monotonic(), self._store.block(order.target)
        nbytes = len(data)
        (put,) = self._access.vault.put(
            [Body(ContentKey(what.key), what.kind, data)],
            ttl_s=self._settings.ttl_s,
            deadline_s=start_s + self._settings.timeout_s + nbytes / _LEAST_NBYTES_PER_S,
            # The result of a URL changes; other values are determined by their keys.
            replaces=what.kind is ObjectKind.RECORDS,
        )
        if put == "full":
            return "full"
        took_s = time.monotonic() - start_s
        SECONDS.labels("keep").observe(took_s)
        if put == "written":
            self._model.written(nbytes, took_s)
        self._use(nbytes)
        return "kept"

    # Bandwidth

    def _use(self, nbytes: int) -> None:
        if rate := self._settings.write_nbytes_per_s:
            self._free_at_s = max(self._free_at_s, time.monotonic()) + nbytes / rate

    async def _pace(self) -> None:
        while (left_s := self._free_at_s - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
