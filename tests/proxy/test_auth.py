from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.datastructures import Headers

from afferent.admission.shares import NAMELESS, Share
from afferent.admission.signed_share import HEADER, SignedShares
from afferent.builtin.apis.registry import APIS, TOKENS, by_path
from afferent.config import Tenant
from afferent.errors import NoPermitLeft, NotAuthenticated, QuotaExceeded
from afferent.proxy import dialects
from afferent.proxy.auth import Access
from afferent.telemetry.trace import Trace

ACME = Tenant(name="acme", weight=2.0, api_keys=("acme-key-0123456789", "acme-key-9876543210"))
OTHER = Tenant(name="other", api_keys=("other-key-0123456789",), max_requests=2)


class Places:
    """Semaphores for tenants, with the requests that hold a permit."""

    def __init__(self) -> None:
        self.inside: dict[str, str] = {}
        self.introduced: dict[str, Share] = {}

    async def acquire_permit(self, request: str, semaphore: str, *, limit: int, queue: bool) -> int:
        assert not queue
        if (left := limit - [*self.inside.values()].count(semaphore)) <= 0:
            raise NoPermitLeft("full")
        self.inside[request] = semaphore
        return left - 1

    def introduce(self, request: str, share: Share) -> None:
        self.introduced[request] = share

    def forget(self, request: str) -> None:
        self.inside.pop(request, None)


def trace(request_id: str) -> Trace:
    return Trace(request_id, "POST /")


PLACES = Places()
ACCESS = Access(PLACES, tenants=(ACME, OTHER), api_key="nameless-0123456789")


@pytest.mark.parametrize(
    ("name", "value", "tenant"),
    [
        ("Authorization", "Bearer acme-key-0123456789", ACME),
        ("authorization", "bearer  acme-key-9876543210 ", ACME),
        ("X-Api-Key", "other-key-0123456789", OTHER),
        ("authorization", "Bearer nameless-0123456789", None),
    ],
)
def test_a_key_is_its_tenants(name: str, value: str, tenant: Tenant | None) -> None:
    assert ACCESS.tenant_of(Headers({name: value})) is tenant


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer "},
        {"authorization": "Basic acme-key-0123456789"},
        {"authorization": "acme-key-0123456789"},
        {"authorization": "Bearer acme-key-012345678"},
        {"authorization": "Bearer acme-key-01234567890"},
        {"authorization": "Bearer ACME-KEY-0123456789"},
        {"authorization": "Bearer \xe4\xf6\xfc-key-0123456789"},
        {"x-api-key": ""},
        {"x-api-key": "nobodys-key-0123456789"},
        # The first header decides: a wrong key is refused even if another header has a valid one.
        {"authorization": "Bearer wrong", "x-api-key": "other-key-0123456789"},
    ],
)
def test_no_key_and_wrong_keys_are_refused_without_a_word_on_them(headers: dict[str, str]) -> None:
    with pytest.raises(NotAuthenticated) as caught:
        ACCESS.tenant_of(Headers(headers))
    for sent in headers.values():
        assert not sent or sent not in caught.value.message


def test_without_keys_everybody_is_welcome() -> None:
    assert Access(PLACES).tenant_of(Headers({})) is None
    assert Access(PLACES).tenant_of(Headers({"authorization": "Bearer none"})) is None


def test_a_tenant_has_only_so_many_requests_at_a_time() -> None:
    asyncio.run(_count_requests())


def test_a_tenant_takes_no_place_of_another() -> None:
    known = [Tenant(name=name, api_keys=(name * 16,), max_requests=1) for name in "ab"]
    access = Access(Places(), tenants=known)

    async def main() -> None:
        for name in "ab":
            headers = {"x-api-key": name * 16}
            assert (await access.enter(trace(f"{name} 1"), headers)).tenant == name
            with pytest.raises(QuotaExceeded):
                await access.enter(trace(f"{name} 2"), headers)

    asyncio.run(main())


async def _count_requests() -> None:
    others, acmes = ({"x-api-key": tenant.api_keys[0]} for tenant in (OTHER, ACME))
    traces = {request_id: trace(request_id) for request_id in "abcde"}
    for request_id in "ab":
        assert await ACCESS.enter(traces[request_id], others) == Share("other")
    with pytest.raises(QuotaExceeded):
        await ACCESS.enter(traces["c"], others)
    ACCESS.leave("c")
    assert await ACCESS.enter(traces["d"], acmes) == Share("acme", ACME.weight)  # has no limit
    assert PLACES.introduced["d"] == Share("acme", ACME.weight)
    assert "c" not in PLACES.introduced
    ACCESS.leave("a")
    assert await ACCESS.enter(traces["e"], others) == Share("other")
    limits = [(each.max_requests, each.num_requests_left) for each in traces.values()]
    assert limits == [(2, 1), (2, 0), (2, 0), (0, 0), (2, 0)]
    for request_id in "abcde":
        ACCESS.leave(request_id)
    assert PLACES.inside == {}


def test_refused_tenant_is_told_when_a_request_of_it_may_end() -> None:
    now_s = 0.0
    access = Access(Places(), tenants=(OTHER,), clock=lambda: now_s)
    headers = {"x-api-key": OTHER.api_keys[0]}

    async def refused_s() -> float:
        with pytest.raises(QuotaExceeded) as refused:
            await access.enter(trace("more"), headers)
        access.leave("more")
        return refused.value.retry_after_s

    async def main() -> None:
        nonlocal now_s
        for request_id in "ab":
            await access.enter(trace(request_id), headers)
        assert await refused_s() == 1.0  # nothing is known yet
        for took_s, request_id, expected_s in ((20.0, "a", 10.0), (300.0, "c", 38.0)):
            now_s += took_s
            access.leave(request_id)
            await access.enter(trace("c"), headers)
            assert await refused_s() == pytest.approx(expected_s)
        for _ in range(50):
            now_s += 1000.0
            access.leave("c")
            await access.enter(trace("c"), headers)
        assert await refused_s() == 60.0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8::1:2:3:4", "2001:db8::/64"),
        ("2001:db8:0:0:ffff::9", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("testclient", ""),
    ],
)
def test_address_pays_for_requests_without_a_tenant(host: str, address: str) -> None:
    places = Places()
    entered = asyncio.run(Access(places).enter(trace("r"), Headers({}), host=host))
    assert entered == places.introduced["r"] == Share(address=address)
    acme = Headers({"x-api-key": "acme-key-0123456789"})
    assert asyncio.run(ACCESS.enter(trace("s"), acme, host=host)).address == ""


def signed(share: Share, secret: bytes = b"secret") -> Headers:
    return Headers({HEADER: SignedShares(secret).sign(share)})


def behind_a_gateway(places: Places | None = None, **settings: Any) -> Access:
    signatures = SignedShares(b"secret")
    given = {"signatures": signatures, "trusts_gateways": True, **settings}
    return Access(places or Places(), **given)


@pytest.mark.parametrize("share", [Share("acme", 3.0), Share(address="192.0.2.7"), NAMELESS])
def test_share_of_a_gateway_is_the_requests_own(share: Share) -> None:
    access = behind_a_gateway()
    assert access.has_tenants
    entered = asyncio.run(access.enter(trace("r"), signed(share), host="198.51.100.1"))
    assert entered == share


def test_tenant_of_a_gateway_has_the_limits_of_its_name() -> None:
    access = behind_a_gateway(tenants=(OTHER,))
    headers = signed(Share("other", 7.0))
    assert access.tenant_of(headers) is OTHER
    assert asyncio.run(access.enter(trace("r"), headers)) == Share("other", 7.0)
    unknown = access.tenant_of(signed(Share("acme", 2.0)))
    assert unknown is not None
    assert (unknown.name, unknown.weight, unknown.max_requests) == ("acme", 2.0, 0)


@pytest.mark.parametrize(
    ("settings", "headers"),
    [
        ({}, Headers({})),
        ({}, signed(NAMELESS, b"another")),
        ({}, Headers({HEADER: "acme"})),
        # A valid key does not make up for an invalid signature.
        ({"api_key": "k" * 16}, Headers({HEADER: "acme", "x-api-key": "k" * 16})),
        ({"api_key": "k" * 16, "trusts_gateways": False}, signed(NAMELESS)),
    ],
)
def test_without_a_valid_signature_nobody_is_a_tenant(
    settings: dict[str, Any], headers: Headers
) -> None:
    with pytest.raises(NotAuthenticated):
        behind_a_gateway(**settings).tenant_of(headers)


@pytest.mark.parametrize("signatures", [None, SignedShares(b"secret")])
def test_gateway_that_is_not_trusted_is_a_client_like_others(
    signatures: SignedShares | None, caplog: pytest.LogCaptureFixture
) -> None:
    access = Access(Places(), signatures=signatures)
    for _ in range(3):
        for headers in (signed(Share("acme")), Headers({HEADER: "acme"})):
            entered = asyncio.run(access.enter(trace("r"), headers, host="192.0.2.7"))
            assert entered == Share(address="192.0.2.7")
    assert len(caplog.messages) == (0 if signatures is None else 1)


def test_client_with_a_key_needs_no_gateway() -> None:
    access = behind_a_gateway(tenants=(ACME,))
    assert access.tenant_of(Headers({"x-api-key": ACME.api_keys[0]})) is ACME


@pytest.mark.parametrize("has_keys", [False, True])
def test_only_a_gateway_signs_and_no_header_of_a_client_is_passed_on(has_keys: bool) -> None:
    signatures, share = SignedShares(b"secret"), Share("acme")
    access = Access(PLACES, tenants=(ACME,) if has_keys else (), signatures=signatures)
    sent = [(HEADER.encode(), b"forged"), (b"authorization", b"Bearer k"), (b"accept", b"*/*")]
    kept = sent[2:] if has_keys else sent[1:]
    assert access.headers_to_pass_on(sent, share, is_gateway=False) == kept
    *passed, (name, value) = access.headers_to_pass_on(sent, share, is_gateway=True)
    assert passed == kept
    assert name == HEADER.encode()
    assert signatures.read(value.decode()) == share
    without = Access(PLACES).headers_to_pass_on(sent, share, is_gateway=True)
    assert without == sent[1:]


def test_every_header_of_a_key_is_known() -> None:
    """Unknown ones would be passed on to an upstream."""
    found = {api.key_header for api in by_path(APIS, TOKENS).values()}
    assert found == set(dialects.KEY_HEADERS)


def test_dialects_are_those_of_the_built_in_apis() -> None:
    """An error has one format and one name, whether an engine or an upstream answers."""
    built_in = by_path(APIS)
    for path, dialect in dialects.DIALECTS.items():
        api = built_in[path]
        assert (api.name, api.id_prefix) == (dialect.name, dialect.id_prefix)
        error = QuotaExceeded("too many")
        assert api.error_body(error, "id") == dialect.error_body(error, "id")
