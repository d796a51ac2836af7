"""What starts the tier's process needs to know of it, without importing a client of one."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from afferent.telemetry.registry import gauge
from afferent.telemetry.trace import declare_stages

TIER: Final = "afferent.tier.main"
NAME: Final = "tier"

FETCHED: Final = "fetch_from_tier"
ASKED: Final = "ask_tier"
"""Stages of a request: what was there came from a tier, or it was asked in vain."""
declare_stages(FETCHED, ASKED)

UP = gauge("afferent_tier_up", "Whether the tier answers: 0 while it is left out")
"""Of all processes the sum: a frontend sets 0, so that it is there while no tier process is."""

_SPARE_S = 0.25


class TierSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """``max_nbytes`` is the largest object that is kept; ``write_nbytes_per_s`` 0 for any rate.

    ``tenant_nbytes`` is the most that this node keeps for one tenant within ``ttl_s``, 0 for any,
    and ``nbytes_by_tenant`` that of those who have a limit of their own.
    """

    store_address: str
    url: str
    secret: str
    timeout_s: float
    wait_s: float
    ttl_s: float
    max_nbytes: int
    write_nbytes_per_s: int
    tenant_nbytes: int = 0
    nbytes_by_tenant: dict[str, int] = {}


def longest_fetch_s(*, timeout_s: float) -> float:
    """A tier process that holds a job for longer than this, and does not renew it, has stopped.

    All that it does for a job takes one time-out; while it waits for what another node makes, it
    renews the job.
    """
    return timeout_s + _SPARE_S
