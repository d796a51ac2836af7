"""Limit of the bytes that a node writes to the tier for each tenant. Pure.

A value expires, so the bytes written within its lifetime are an upper bound of those stored. Each
node counts its own writes: a fleet stores at most this limit times the number of nodes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

_NUM_SPANS = 64
"""Number of time spans within the lifetime; the values written in one span expire together."""


@dataclass(slots=True)
class _Written:
    nbytes: int = 0
    spans: deque[tuple[int, int]] = field(default_factory=deque)
    """Numbers of spans, and bytes."""


class TenantBudget:
    """Bytes written for each tenant within the lifetime of values.

    Invariants:
        - ``nbytes`` of a tenant is the sum of its spans, which are in order of time.
    """

    def __init__(self, most_nbytes: int, *, ttl_s: float, own: Mapping[str, int]) -> None:
        """Set ``most_nbytes`` for each tenant, 0 for no limit; ``own`` overrides it by tenant."""
        self._most_nbytes, self._own = most_nbytes, own
        self._span_s = ttl_s / _NUM_SPANS
        self._written: dict[str, _Written] = {}

    def has_room(self, tenant: str, nbytes: int, *, now_s: float) -> bool:
        """Whether ``nbytes`` more may be written for a tenant."""
        most = self._own.get(tenant) or self._most_nbytes
        return not most or self._nbytes_of(tenant, now_s) + nbytes <= most

    def add(self, tenant: str, nbytes: int, *, now_s: float) -> None:
        """Count written bytes."""
        if not (self._own.get(tenant) or self._most_nbytes):
            return
        self._nbytes_of(tenant, now_s)
        written = self._written.setdefault(tenant, _Written())
        number = int(now_s / self._span_s)
        if written.spans and written.spans[-1][0] == number:
            nbytes_before = written.spans.pop()[1]
        else:
            nbytes_before = 0
        written.spans.append((number, nbytes_before + nbytes))
        written.nbytes += nbytes

    def _nbytes_of(self, tenant: str, now_s: float) -> int:
        """Return the bytes that may still be stored."""
        written = self._written.get(tenant)
        if written is None:
            return 0
        oldest = int(now_s / self._span_s) - _NUM_SPANS
        while written.spans and written.spans[0][0] < oldest:
            written.nbytes -= written.spans.popleft()[1]
        if not written.spans:
            del self._written[tenant]
        return written.nbytes
