"""A node's access to its tier: calls in threads, behind a circuit breaker."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from afferent.errors import AfferentError, TierUnavailable, in_a_line
from afferent.telemetry.registry import counter
from afferent.tier.breaker import Breaker
from afferent.tier.launch import UP
from afferent.tier.vault import Vault

T = TypeVar("T")

log = logging.getLogger(__name__)

OPENINGS = counter("afferent_tier_outages_total", "How often the tier was left out")

_NUM_THREADS = 8


class Access:
    """Calls to a tier. It begins with an open breaker: the first probe must succeed.

    Invariants:
        - Exactly one of ``_is_up`` and ``_is_down`` is set.
    """

    def __init__(self, vault: Vault, *, timeout_s: float) -> None:
        self.vault, self._timeout_s = vault, timeout_s
        self._breaker = Breaker()
        self._breaker.trip(now_s=time.monotonic())
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tier")
        self._is_up, self._is_down = asyncio.Event(), asyncio.Event()
        self._is_down.set()
        UP.labels().set(0)

    @property
    def is_up(self) -> bool:
        return self._is_up.is_set()

    async def until_up(self) -> None:
        await self._is_up.wait()

    async def call(self, work: Callable[[], T]) -> T:
        """Run a function in a thread.

        Raises:
            TierUnavailable: The tier is down, or the call failed; several failures open the
                breaker.
        """
        if not self.is_up:
            raise TierUnavailable("the tier does not answer, and is left out")
        try:
            result = await self._in_thread(work)
        except TierUnavailable as error:
            self._breaker.failed(now_s=time.monotonic())
            if self._breaker.is_open and self.is_up:
                self._leave_out(error)
            raise
        if self.is_up:  # a late answer does not end an outage: a probe does
            self._breaker.succeeded()
        return result

    async def keep_probing(self) -> None:
        """Probe the tier while the breaker is open."""
        while True:
            await self._is_down.wait()
            await asyncio.sleep(self._breaker.probe_in_s(now_s=time.monotonic()))
            deadline_s = time.monotonic() + self._timeout_s
            try:
                await self._in_thread(lambda: self.vault.tier.health(deadline_s=deadline_s))  # noqa: B023
            except TierUnavailable as error:
                self._breaker.probe_failed(now_s=time.monotonic())
                log.info("the tier does not answer", extra={"reason": error.message})
            else:
                self._breaker.succeeded()
                self._is_down.clear()
                self._is_up.set()
                UP.labels().set(1)
                log.info("the tier answers")

    async def _in_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except AfferentError:
            raise
        except Exception as error:  # a tier may be a third party's
            log.exception("the tier failed in a way that it should not")
            raise TierUnavailable(in_a_line(error)) from error

    def _leave_out(self, error: TierUnavailable) -> None:
        self._is_up.clear()
        self._is_down.set()
        UP.labels().set(0)
        OPENINGS.labels().inc()
        log.warning("the tier is left out", extra={"reason": error.message})
