"""Fetcher: a node's look-ups of missing objects in its tier, batched.

The store gives it jobs (`Take` of the role ``fetch``). Each job soon has one of two results: the
object is in its block, verified, or it has to be made here. If another node is making it, the
fetcher waits for as long as the cost model allows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from afferent.errors import AfferentError, FormatError, TierUnavailable, Unavailable
from afferent.store.block import codec
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.results import Fetching, Order
from afferent.telemetry.registry import SHORT_SECONDS, counter, histogram
from afferent.tier.access import Access
from afferent.tier.claims import HeldClaims
from afferent.tier.costs import Choice, CostModel
from afferent.tier.launch import ASKED, FETCHED
from afferent.tier.sealed import Head
from afferent.tier.vault import Wish
from afferent.types import ContentKey, Failure, ObjectKind, decode, span_since

log = logging.getLogger(__name__)

MISSES = counter(
    "afferent_tier_misses_total",
    "Objects that were missing here, by what became of it: fetched, absent, left_out by their "
    "cost, or unavailable",
    outcome=("fetched", "absent", "left_out", "unavailable"),
)
WAITS = counter(
    "afferent_tier_waits_total",
    "Objects that another node was making: in_time, or made here all the same",
    outcome=("in_time", "in_vain"),
)
FETCHED_BYTES = counter("afferent_tier_fetched_bytes_total", "Bytes that came from the tier")
SECONDS = histogram(
    "afferent_tier_seconds",
    "What the tier took: to look up, to fetch, to keep",
    SHORT_SECONDS,
    what=("look_up", "fetch", "keep"),
)

NUM_AT_ONCE = 64
"""Limit of concurrent objects: further ones are made here at once."""
_NUM_EXCHANGES = 4
_TAKE_AGAIN_S = 0.05
_LEAST_PART = 0.5
"""Part of its timeout: an object that has waited longer for an exchange is made here."""

_fetching_decoder = msgspec.msgpack.Decoder(Fetching)


class _End(Enum):
    FETCHED = "fetched"
    ABSENT = "absent"
    ANOTHERS = "anothers"
    UNAVAILABLE = "unavailable"


@dataclass(slots=True, eq=False)
class _Asked:
    """One job, until it is answered."""

    order: Order
    what: Fetching
    choice: Choice
    start_ns: int
    wait_until_s: float
    deadline_s: float = 0.0
    """Deadline of the current exchange, including the wait for it."""
    was_waited_for: bool = False
    used_nbytes: int = 0
    end: asyncio.Future[_End] = field(init=False)

    @property
    def key(self) -> ContentKey:
        return ContentKey(self.what.key)


@dataclass(slots=True)
class _Exchange:
    """Result of one batched exchange, with its times."""

    ends: list[_End]
    look_up_s: float = 0.0
    fetch_s: float = 0.0
    fetched_nbytes: int = 0
    late_nbytes: int = 0
    """Bytes that did not arrive within ``fetch_s``."""
    rejected: set[ContentKey] = field(default_factory=set)
    """Keys with invalid values.

    They are deleted, so the next values of these keys are not invalid. So neither hit rates nor
    partial transfer times are learned from them.
    """


class Fetcher:
    """Serves fetch jobs until cancelled.

    Invariants:
        - At most `NUM_AT_ONCE` jobs are in progress.
        - Each pending job waits for exactly one exchange.
    """

    def __init__(
        self,
        store: AsyncDaemonStore,
        access: Access,
        model: CostModel,
        claims: HeldClaims,
    ) -> None:
        self._store, self._access, self._model, self._claims = store, access, model, claims
        self._pending: list[_Asked] = []
        self._stirred = asyncio.Event()

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_AT_ONCE):
                tasks.create_task(self._serve())
            for _ in range(_NUM_EXCHANGES):
                tasks.create_task(self._exchange_all())

    async def _serve(self) -> None:
        """Serve one job after another, and none while the tier is down: they are made here."""
        while True:
            await self._access.until_up()
            try:
                order = await self._store.take("fetch")
                await self._do(order)
            except Unavailable:  # the store restarts; its jobs are lost
                await asyncio.sleep(_TAKE_AGAIN_S)
            except AfferentError as error:
                log.warning("an object could not be fetched", extra={"reason": error.message})

    async def _do(self, order: Order) -> None:
        what, start_ns = decode(_fetching_decoder, order.payload), time.monotonic_ns()
        choice = self._model.choose(what.kind, nbytes=what.nbytes, cost_us=what.cost_us)
        if not choice.asks:
            MISSES.labels("left_out").inc()
            await self._answer(order, start_ns, f"not asked: {choice.why}")
            return
        wait_until_s = time.monotonic() + choice.wait_s
        asked = _Asked(order, what, choice, start_ns, wait_until_s)
        end = await self._ask(asked)
        while end is _End.ANOTHERS:
            asked.was_waited_for = True
            await asyncio.sleep(self._model.poll_s())
            self._store.renew(order)
            end = await self._ask(asked)
        if asked.was_waited_for:
            WAITS.labels("in_time" if end is _End.FETCHED else "in_vain").inc()
        MISSES.labels(end.value).inc()
        note = f"{end.value}: {choice.why}"
        await self._answer(order, start_ns, note, used_nbytes=asked.used_nbytes)

    async def _answer(
        self, order: Order, start_ns: int, note: str, *, used_nbytes: int = 0
    ) -> None:
        stage = FETCHED if used_nbytes else ASKED
        span = span_since(start_ns, "tier", stage, copied_nbytes=used_nbytes, note=note)
        failure = None if used_nbytes else Failure("absent", "the tier does not have it")
        await self._store.finish(order, used_nbytes=used_nbytes, failure=failure, spans=[span])

    async def _ask(self, asked: _Asked) -> _End:
        """Ask in the next exchange, together with all other pending jobs."""
        asked.end = asyncio.get_running_loop().create_future()
        asked.deadline_s = time.monotonic() + self._model.limits.timeout_s
        self._pending.append(asked)
        self._stirred.set()
        return await asked.end

    async def _exchange_all(self) -> None:
        while True:
            await self._stirred.wait()
            await asyncio.sleep(0)  # a request's jobs arrive together; let their tasks run first
            batch, self._pending = self._in_time(), []
            self._stirred.clear()
            if not batch:
                continue
            try:
                exchange = await self._access.call(lambda: self._exchange(batch))  # noqa: B023
            except AfferentError:  # or the store has restarted meanwhile
                exchange = _Exchange([_End.UNAVAILABLE] * len(batch))
            self._learn(batch, exchange)
            for asked, end in zip(batch, exchange.ends, strict=True):
                if not asked.end.done():
                    asked.end.set_result(end)

    def _in_time(self) -> list[_Asked]:
        """Return the jobs with enough time left: an exchange ends by its earliest deadline."""
        least_s = time.monotonic() + _LEAST_PART * self._model.limits.timeout_s
        for asked in self._pending:
            if asked.deadline_s < least_s:
                asked.end.set_result(_End.UNAVAILABLE)
        return [asked for asked in self._pending if not asked.end.done()]

    def _learn(self, batch: Sequence[_Asked], exchange: _Exchange) -> None:
        if exchange.look_up_s:
            SECONDS.labels("look_up").observe(exchange.look_up_s)
            self._model.looked_up(exchange.look_up_s)
        if exchange.late_nbytes:
            self._model.came_late(exchange.late_nbytes, exchange.fetch_s)
        elif exchange.fetched_nbytes:
            SECONDS.labels("fetch").observe(exchange.fetch_s)
            FETCHED_BYTES.labels().inc(exchange.fetched_nbytes)
            if not exchange.rejected:
                self._model.fetched(exchange.fetched_nbytes, exchange.fetch_s)
        for asked, end in zip(batch, exchange.ends, strict=True):
            is_told = asked.key not in exchange.rejected and not asked.was_waited_for
            if end in (_End.FETCHED, _End.ABSENT) and is_told:
                self._model.was_there(asked.what.kind, end is _End.FETCHED)

    # In a thread

    def _exchange(self, batch: Sequence[_Asked]) -> _Exchange:
        """Do one exchange: one round trip to look up, one for claims; then the bytes."""
        vault, start_s = self._access.vault, time.monotonic()
        deadline_s = min(asked.deadline_s for asked in batch)
        exchange = _Exchange([_End.ABSENT] * len(batch))
        keys = [asked.key for asked in batch]
        heads = vault.look_up(keys, deadline_s=deadline_s, rejected=exchange.rejected)
        exchange.look_up_s = time.monotonic() - start_s
        there = [
            (index, head)
            for index, head in enumerate(heads)
            if head is not None and _fits(head, batch[index].what)
        ]
        absent = [index for index, head in enumerate(heads) if head is None]
        self._claim(batch, absent, exchange, deadline_s)
        if there:
            self._fetch(batch, there, exchange, deadline_s)
        return exchange

    def _claim(
        self,
        batch: Sequence[_Asked],
        absent: Sequence[int],
        exchange: _Exchange,
        deadline_s: float,
    ) -> None:
        """Claim the absent keys: this node makes them, unless another node has a claim."""
        now_s = time.monotonic()
        wanted = [
            index
            for index in absent
            if batch[index].choice.waits and now_s < batch[index].wait_until_s
        ]
        asked = {index: (batch[index].key, batch[index].choice.wait_s) for index in wanted}
        with contextlib.suppress(TierUnavailable):  # then it is made here
            are_ours = self._claims.claim(list(asked.values()), deadline_s=deadline_s)
            for index, is_ours in zip(asked, are_ours, strict=True):
                if not is_ours:
                    exchange.ends[index] = _End.ANOTHERS

    def _fetch(
        self,
        batch: Sequence[_Asked],
        there: Sequence[tuple[int, Head]],
        exchange: _Exchange,
        deadline_s: float,
    ) -> None:
        start_s = time.monotonic()
        wishes = [Wish(head, self._store.block(batch[index].order.target)) for index, head in there]
        longest_s = max(batch[index].choice.fetch_s for index, _ in there)
        deadline_s = min(deadline_s, start_s + longest_s)
        try:
            are_good = self._access.vault.fetch(
                wishes, deadline_s=deadline_s, rejected=exchange.rejected
            )
        except TierUnavailable:  # or too slow, which the next look-up need not be
            are_good = [False] * len(wishes)
            if time.monotonic() >= deadline_s:  # else the rate of the link has not changed
                exchange.late_nbytes = sum(head.nbytes for _, head in there)
            for index, _ in there:
                exchange.ends[index] = _End.UNAVAILABLE
        exchange.fetch_s = time.monotonic() - start_s
        for (index, head), wish, is_good in zip(there, wishes, are_good, strict=True):
            if not is_good:
                continue
            if not _can_be_read(head, wish.target[: head.nbytes]):
                self._access.vault.reject(head.key, "it is no block", deadline_s=deadline_s)
                exchange.rejected.add(head.key)
                continue
            exchange.ends[index] = _End.FETCHED
            batch[index].used_nbytes = head.nbytes
            exchange.fetched_nbytes += head.nbytes


def _fits(head: Head, what: Fetching) -> bool:
    return head.kind == what.kind and head.nbytes <= what.nbytes


def _can_be_read(head: Head, data: memoryview) -> bool:
    """Whether readers accept it as a block; other kinds are checked by their readers."""
    if head.kind not in (ObjectKind.FEATURES, ObjectKind.EMBEDDINGS):
        return True
    try:
        codec.view(data.toreadonly())
    except FormatError:
        return False
    return True
