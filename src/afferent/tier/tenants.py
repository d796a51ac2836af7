"""How much a node keeps in the tier for each tenant. Pure.

A value ends by its time, so what was written within that time is what may be there at most. Each
node counts what it writes itself: a fleet keeps at most so many times this for a tenant.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

_NUM_SPANS = 64
"""Time is cut into so many spans; what was written in one ends together."""


@dataclass(slots=True)
class _Written:
    nbytes: int = 0
    spans: deque[tuple[int, int]] = field(default_factory=deque)
    """Numbers of spans, and bytes."""


class TenantBudget:
    def __init__(self, most_nbytes: int, *, ttl_s: float, own: Mapping[str, int]) -> None:
        """``most_nbytes`` for each tenant, 0 for any number; ``own`` are limits of some."""
        self._most_nbytes, self._own = most_nbytes, own
        self._span_s = ttl_s / _NUM_SPANS
        self._written: dict[str, _Written] = {}

    def has_room(self, tenant: str, nbytes: int, *, now_s: float) -> bool:
        """Whether so many bytes more may be kept for it."""
        most = self._own.get(tenant) or self._most_nbytes
        return not most or self._nbytes_of(tenant, now_s) + nbytes <= most

    def add(self, tenant: str, nbytes: int, *, now_s: float) -> None:
        """They have been written."""
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
        """What may be there still."""
        written = self._written.get(tenant)
        if written is None:
            return 0
        oldest = int(now_s / self._span_s) - _NUM_SPANS
        while written.spans and written.spans[0][0] < oldest:
            written.nbytes -= written.spans.popleft()[1]
        if not written.spans:
            del self._written[tenant]
        return written.nbytes
