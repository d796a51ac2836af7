"""What starts the tier's process needs to know of it, without importing a client of one."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from afferent.telemetry.trace import declare_stages

TIER: Final = "afferent.tier.main"
NAME: Final = "tier"

FETCHED: Final = "fetch_from_tier"
ASKED: Final = "ask_tier"
"""Stages of a request: what was there came from a tier, or it was asked in vain."""
declare_stages(FETCHED, ASKED)

_SPARE_S = 2.0


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


def longest_fetch_s(*, timeout_s: float, wait_s: float) -> float:
    """Who holds on to a job for longer than this hangs: it waits for its turn, for what another
    node makes, and fetches that.
    """
    return wait_s + 3 * timeout_s + _SPARE_S
