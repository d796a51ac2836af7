"""Fair order of requests that are served in small parts: the least served is first. Pure.

Tenants get work in proportion to their weights, and the requests of a tenant get equal amounts. The
parts of one request count together: a request for eight answers gets as many tokens in all as a
request for one.

Invariants:
    - A new tenant or request begins with the work of the least served one: it neither waits until
      the others have caught up nor makes them wait.
    - A tenant without requests is forgotten.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from afferent.admission.shares import Share

H = TypeVar("H", bound=Hashable)

Rank = tuple[float, float]
"""Rank of a request; the request with the smaller rank is first."""


@dataclass(slots=True, eq=False)
class _Request:
    had: float
    num_parts: int = 0


@dataclass(slots=True, eq=False)
class _Tenant(Generic[H]):
    """Served tenant; ``had`` is its work divided by its weight."""

    had: float
    requests: dict[H, _Request] = field(default_factory=dict)


class Served(Generic[H]):
    """Work that requests have received, by tenant."""

    def __init__(self) -> None:
        self._tenants: dict[tuple[str, str], _Tenant[H]] = {}

    def enter(self, request: H, share: Share) -> None:
        """Add a part of a request. O(tenants + requests of this tenant)."""
        tenant = self._tenants.get(share.payer)
        if tenant is None:
            least = min((each.had for each in self._tenants.values()), default=0.0)
            tenant = self._tenants[share.payer] = _Tenant(least)
        found = tenant.requests.get(request)
        if found is None:
            least = min((each.had for each in tenant.requests.values()), default=0.0)
            found = tenant.requests[request] = _Request(least)
        found.num_parts += 1

    def leave(self, request: H, share: Share) -> None:
        """Remove a part of a request that has entered."""
        tenant = self._tenants[share.payer]
        found = tenant.requests[request]
        found.num_parts -= 1
        if not found.num_parts:
            del tenant.requests[request]
        if not tenant.requests:
            del self._tenants[share.payer]

    def charge(self, request: H, share: Share, work: float) -> None:
        """Record work that was done for a request that has entered."""
        tenant = self._tenants[share.payer]
        tenant.had += work / share.weight
        tenant.requests[request].had += work

    def rank(self, request: H, share: Share) -> Rank:
        """Return the rank of a request that has entered."""
        tenant = self._tenants[share.payer]
        return tenant.had, tenant.requests[request].had

    def clear(self) -> None:
        """Forget all requests."""
        self._tenants.clear()
