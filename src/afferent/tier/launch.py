"""Settings to start the tier process, without importing a tier client."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from afferent.telemetry.registry import gauge
from afferent.telemetry.trace import declare_stages

TIER: Final = "afferent.tier.main"
NAME: Final = "tier"

FETCHED: Final = "fetch_from_tier"
ASKED: Final = "ask_tier"
"""Stages of a request: fetched from a tier, or asked without success."""
declare_stages(FETCHED, ASKED)

UP = gauge("afferent_tier_up", "Whether the tier answers: 0 while it is left out")
"""Summed over all processes: a frontend sets 0, so that it exists without a tier process."""

_SPARE_S = 0.25


class TierSettings(Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings of the tier process.

    ``max_nbytes`` is the limit for one copied object; ``write_nbytes_per_s`` is 0 for no limit.
    ``tenant_nbytes`` is the limit for one tenant's copies of this node within ``ttl_s``, 0 for no
    limit; ``nbytes_by_tenant`` has the tenants with their own limit.
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
    """Return the maximum time of a job that is not renewed; a tier process above it has stopped.

    All its work on a job takes at most one timeout; while it waits for another node, it renews the
    job.
    """
    return timeout_s + _SPARE_S
