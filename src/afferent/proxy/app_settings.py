"""Settings of a frontend's application."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from afferent.admission.shares import Share
from afferent.config import RequestLimits
from afferent.telemetry.spans import Tracing


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """Settings of a frontend's application."""

    model_name: str
    aliases: tuple[str, ...] = ()
    """Further names of the model in requests; answers have ``model_name``."""
    limits: RequestLimits
    request_timeout_s: float
    explain: bool
    limits_by_tenant: Mapping[str, RequestLimits] = field(default_factory=dict)
    """Limits of tenants with their own."""
    refuses_unknown: bool = False
    """Whether unknown parameters are refused instead of ignored."""
    tracing: Tracing | None = None
    page_port: int = -1
    """Port of the live page; not positive: it is unknown, or there is none."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may send requests from a browser; ``*`` allows all."""

    @property
    def model_names(self) -> tuple[str, ...]:
        return (self.model_name, *self.aliases)

    def limits_of(self, share: Share) -> RequestLimits:
        return self.limits_by_tenant.get(share.tenant, self.limits)
