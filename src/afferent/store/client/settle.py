"""Wait for what an `acquire` has found in production."""

from __future__ import annotations

from collections.abc import Sequence

from afferent.store.client.async_store import AsyncDaemonStore
from afferent.store.protocol.results import Outcome, Pending
from afferent.types import ContentKey


async def settle(
    store: AsyncDaemonStore,
    lease: str,
    item_keys: Sequence[ContentKey],
    outcomes: Sequence[Outcome],
    *,
    timeout_s: float,
) -> list[Outcome]:
    """Wait for the pending outcomes of an `acquire`, and return all outcomes in the same order.

    Raises:
        DeadlineExceeded: An object was not made in time.
    """
    pending = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, Pending)]
    settled = list(outcomes)
    if pending:
        waited = [item_keys[index] for index in pending]
        made = await store.wait(lease, waited, timeout_s=timeout_s)
        for index, outcome in zip(pending, made, strict=True):
            settled[index] = outcome
    return settled
