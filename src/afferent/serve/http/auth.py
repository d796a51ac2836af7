"""Who is asking: the API key that came, whose it is, and how many requests that one may have."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from afferent.config import Tenant
from afferent.errors import NoPermitLeft, NotAuthenticated, QuotaExceeded
from afferent.quota.shares import NAMELESS, Share
from afferent.serve.apis.registry import APIS
from afferent.serve.http.doors import Doors

_KEY_HEADERS = tuple(dict.fromkeys(api.key_header for api in APIS))
KEY_HEADERS = frozenset(header.name.encode() for header in _KEY_HEADERS)
"""Where a key may stand, in lower case."""


class Store(Protocol):
    """What of a store is needed: `AsyncDaemonStore` has it."""

    def introduce(self, request: str, share: Share) -> None: ...

    async def acquire_permit(
        self, request: str, semaphore: str, *, limit: int, queue: bool
    ) -> None: ...

    def forget(self, request: str) -> None: ...


class Access:
    """The keys of all tenants. Without any, everybody is the same, nameless tenant."""

    def __init__(
        self,
        store: Store,
        *,
        api_key: str = "",
        tenants: Sequence[Tenant] = (),
        doors: Doors | None = None,
    ) -> None:
        """
        Args:
            store: Counts requests over all processes, and is told whose they are.
            api_key: The nameless tenant's.
            doors: Where the server closes them at times.
        """
        self._store, self._doors = store, doors
        owners: list[tuple[str, Tenant | None]] = []
        owners += [(key, tenant) for tenant in tenants for key in tenant.api_keys]
        owners += [(api_key, None)] if api_key else []
        self._keys = [(_digest(key), tenant) for key, tenant in owners]
        self.has_tenants = bool(tenants)
        """Whether tenants are configured, and clients without one are apart from them."""
        self._has_quotas = any(tenant.max_requests for tenant in tenants)

    @property
    def has_keys(self) -> bool:
        """Whether clients have to send one, which is then nobody else's business."""
        return bool(self._keys)

    async def enter(self, request_id: str, headers: Mapping[str, str], *, host: str = "") -> Share:
        """Of the tenant whose request it is, which has a place until `leave`.

        Args:
            headers: As for `tenant_of`.
            host: The client's address: it pays for requests without a tenant.

        Raises:
            NotAuthenticated: There is no key, or nobody's.
            QuotaExceeded: The tenant has as many requests running as it may have.
            EngineUnavailable: Nobody is let in now.
        """
        tenant = self.tenant_of(headers)
        if self._doors is not None:
            self._doors.enter(request_id)
        if tenant is None:
            share = Share(address=_network(host)) if host else NAMELESS
            self._store.introduce(request_id, share)
            return share
        if tenant.max_requests:
            try:
                await self._store.acquire_permit(
                    _place(request_id),
                    f"tenant/{tenant.name}",
                    limit=tenant.max_requests,
                    queue=False,
                )
            except NoPermitLeft as error:
                raise QuotaExceeded(
                    f"{tenant.max_requests} requests are running already; try again"
                ) from error
        share = Share(tenant.name, tenant.weight)
        self._store.introduce(request_id, share)
        return share

    def leave(self, request_id: str) -> None:
        """The request has ended, wherever; its place is free."""
        if self._doors is not None:
            self._doors.leave(request_id)
        if self._has_quotas:
            self._store.forget(_place(request_id))

    def tenant_of(self, headers: Mapping[str, str]) -> Tenant | None:
        """Whose key it is; ``None`` for the nameless tenant.

        Args:
            headers: With lower-case names. The key stands where clients of any API put it,
                whichever is asked: the first of those headers that is there decides.

        Raises:
            NotAuthenticated: There is no key, or nobody's.
        """
        if not self._keys:
            return None
        sent = _sent_key(headers)
        if not sent:
            raise NotAuthenticated("an API key is needed")
        digest = _digest(sent)
        # All of them, whichever it is: the time tells nothing about the keys there are.
        matches = [tenant for known, tenant in self._keys if hmac.compare_digest(known, digest)]
        if not matches:
            raise NotAuthenticated("the API key is not known")
        return matches[0]


def headers_to_pass_on(
    headers: Iterable[tuple[bytes, bytes]], access: Access
) -> list[tuple[bytes, bytes]]:
    """Without the client's key, where it is one of ours."""
    return [
        (name, value) for name, value in headers if not (access.has_keys and name in KEY_HEADERS)
    ]


def _network(host: str) -> str:
    """Return what pays for a client: its address, and of IPv6 the /64 network, within which a
    client may choose its address.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return ""
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


def _place(request_id: str) -> str:
    """A lease of its own: the request's is given up as soon as the engine has accepted it."""
    return f"{request_id} place"


def _sent_key(headers: Mapping[str, str]) -> str:
    found = (header.key_in(headers) for header in _KEY_HEADERS)
    return next((key for key in found if key is not None), "")


def _digest(key: str) -> bytes:
    """Of one length, so that a comparison does not tell that of a key."""
    return hashlib.sha256(key.encode()).digest()
