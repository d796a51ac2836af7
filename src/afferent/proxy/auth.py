"""Authentication of requests: the API key or a gateway's signature, its tenant, and the tenant's
limit of requests.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import ipaddress
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from afferent.admission.gate import retry_in_s
from afferent.admission.shares import NAMELESS, Share
from afferent.admission.signed_share import HEADER, SignedShares
from afferent.config import Tenant
from afferent.errors import NoPermitLeft, NotAuthenticated, QuotaExceeded
from afferent.proxy import dialects
from afferent.proxy.doors import Doors
from afferent.store.client.async_store import AsyncDaemonStore
from afferent.telemetry.trace import Trace

log = logging.getLogger(__name__)

KEY_HEADERS = frozenset(header.name.encode() for header in dialects.KEY_HEADERS)
"""Headers that may contain a key, in lower case."""
_SIGNED: Final = HEADER.encode()

_NEWEST: Final = 0.2
"""Weight of the newest request in the mean time of a tenant's requests."""


class Access:
    """Keys of all tenants. Without keys, all clients are the default tenant."""

    def __init__(
        self,
        store: AsyncDaemonStore,
        *,
        api_key: str = "",
        tenants: Sequence[Tenant] = (),
        signatures: SignedShares | None = None,
        trusts_gateways: bool = False,
        doors: Doors | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create it.

        Args:
            store: Counts requests over all processes, and stores their tenants.
            api_key: Key of the default tenant.
            signatures: Those of the fleet, if it has a secret.
            trusts_gateways: Whether a gateway's signature is accepted in place of a key.
            doors: Admission switch of the server, if there is one.
            clock: Time in seconds.
        """
        self._store, self._doors, self._clock = store, doors, clock
        self._running: dict[str, tuple[str, float]] = {}
        """Tenant and start of the requests here that have a slot."""
        self._took_s: dict[str, float] = {}
        """Mean time of the requests of a tenant with a limit, as far as they ended here."""
        owners: list[tuple[str, Tenant | None]] = []
        owners += [(key, tenant) for tenant in tenants for key in tenant.api_keys]
        owners += [(api_key, None)] if api_key else []
        self._keys = [(_digest(key), tenant) for key, tenant in owners]
        self._by_name = {tenant.name: tenant for tenant in tenants}
        self._signatures, self._trusts_gateways = signatures, trusts_gateways
        self._has_warned = False
        self.has_tenants = bool(tenants) or trusts_gateways
        """Whether tenants are configured, and clients without one are apart from them."""
        self._has_quotas = any(tenant.max_requests for tenant in tenants)

    @property
    def has_keys(self) -> bool:
        """Whether clients have to send a key, which is then not passed on."""
        return bool(self._keys) or self._trusts_gateways

    async def enter(self, trace: Trace, headers: Mapping[str, str], *, host: str = "") -> Share:
        """Admit a request and return its share; the tenant's slot is taken until `leave`.

        Args:
            trace: Of the request; it gets the tenant's limit of requests, and the rest of it.
            headers: As for `tenant_of`.
            host: Address of the client; fair shares are by address for requests without a tenant.

        Raises:
            NotAuthenticated: There is no key, or an unknown one.
            QuotaExceeded: The tenant has reached its limit of running requests.
            EngineUnavailable: No requests are admitted now.
        """
        signed, request_id = self._signed(headers), trace.request_id
        tenant = self._tenant_of_key(headers) if signed is None else self._tenant_of_share(signed)
        if self._doors is not None:
            self._doors.enter(request_id)
        if tenant is None:
            address = _network(host) if signed is None else signed.address
            share = Share(address=address) if address else NAMELESS
            self._store.introduce(request_id, share)
            return share
        if tenant.max_requests:
            trace.max_requests = tenant.max_requests
            try:
                trace.num_requests_left = await self._store.acquire_permit(
                    _place(request_id),
                    f"tenant/{tenant.name}",
                    limit=tenant.max_requests,
                    queue=False,
                )
            except NoPermitLeft as error:
                raise QuotaExceeded(
                    f"{tenant.max_requests} requests are running already; try again",
                    retry_after_s=self._next_end_s(tenant),
                ) from error
            self._running[request_id] = tenant.name, self._clock()
        share = Share(tenant.name, tenant.weight if signed is None else signed.weight)
        self._store.introduce(request_id, share)
        return share

    def leave(self, request_id: str) -> None:
        """End a request and free its slot."""
        if self._doors is not None:
            self._doors.leave(request_id)
        if self._has_quotas:
            self._store.forget(_place(request_id))
        if (begun := self._running.pop(request_id, None)) is not None:
            name, start_s = begun
            took_s = self._clock() - start_s
            mean_s = self._took_s.get(name, took_s)
            self._took_s[name] = mean_s + _NEWEST * (took_s - mean_s)

    def _next_end_s(self, tenant: Tenant) -> float:
        """Return the seconds after which one of the tenant's requests ends, on average."""
        return retry_in_s(self._took_s.get(tenant.name, 0.0) / tenant.max_requests)

    def tenant_of(self, headers: Mapping[str, str]) -> Tenant | None:
        """Return the tenant of the key, or of a gateway's signature; ``None`` for the default
        tenant.

        A tenant of a gateway that has the name of one of this server has its limits.

        Args:
            headers: With lower-case names. The key may be in the header of any API, for every
                endpoint: the first of these headers decides.

        Raises:
            NotAuthenticated: There is no key, or an unknown one.
        """
        signed = self._signed(headers)
        return self._tenant_of_key(headers) if signed is None else self._tenant_of_share(signed)

    def _tenant_of_share(self, signed: Share) -> Tenant | None:
        if not signed.tenant:
            return None
        unknown = Tenant(name=signed.tenant, api_keys=(), weight=signed.weight)
        return self._by_name.get(signed.tenant, unknown)

    def _tenant_of_key(self, headers: Mapping[str, str]) -> Tenant | None:
        if not self.has_keys:
            return None
        sent = _sent_key(headers)
        if not sent:
            raise NotAuthenticated("an API key is needed")
        digest = _digest(sent)
        # Compare all keys: the time reveals nothing about them.
        matches = [tenant for known, tenant in self._keys if hmac.compare_digest(known, digest)]
        if not matches:
            raise NotAuthenticated("the API key is not known")
        return matches[0]

    def headers_to_pass_on(
        self, headers: Iterable[tuple[bytes, bytes]], share: Share, *, is_gateway: bool
    ) -> list[tuple[bytes, bytes]]:
        """Return the headers without the client's key, if the server has keys.

        Args:
            share: Of the request.
            is_gateway: Whether the headers go to another machine, which may be Afferent: they get
                the signed share, if the fleet has a secret.
        """
        own = {_SIGNED, *KEY_HEADERS} if self.has_keys else {_SIGNED}
        passed = [(name, value) for name, value in headers if name not in own]
        if is_gateway and self._signatures is not None:
            passed.append((_SIGNED, self._signatures.sign(share).encode()))
        return passed

    def _signed(self, headers: Mapping[str, str]) -> Share | None:
        """Return the share that a gateway has signed; ``None`` if there is none, or if gateways are
        not trusted here.

        Raises:
            NotAuthenticated: Its signature is not valid.
        """
        value = headers.get(HEADER)
        if value is None or self._signatures is None:
            return None
        if self._trusts_gateways:
            return self._signatures.read(value)
        if not self._has_warned:
            self._warn(value)
        return None

    def _warn(self, value: str) -> None:
        """Log once that a gateway of this fleet names tenants, which count as one client here."""
        with contextlib.suppress(NotAuthenticated):
            if self._signatures is not None and self._signatures.read(value).tenant:
                self._has_warned = True
                log.warning("a gateway names tenants, which are one here: see --gateway-tenants")


@functools.lru_cache(maxsize=4096)
def _network(host: str) -> str:
    """Return the fair-share address of a client: for IPv6 its /64 network.

    A client may choose its address within that network.
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
    """Return a separate lease: the request's own ends when the engine has accepted it."""
    return f"{request_id} place"


def _sent_key(headers: Mapping[str, str]) -> str:
    found = (header.key_in(headers) for header in dialects.KEY_HEADERS)
    return next((key for key in found if key is not None), "")


def _digest(key: str) -> bytes:
    """Hash a key to a fixed length, so that a comparison does not reveal its length."""
    return hashlib.sha256(key.encode()).digest()
