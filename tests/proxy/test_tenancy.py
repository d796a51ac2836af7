"""Fields that are added to bodies so that tenants share no cache of an upstream."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afferent.errors import InvalidRequest, ResponseNotFound, UnsupportedParameter
from afferent.proxy.media_locations import TABLE
from afferent.proxy.tenancy import MEMORYLESS, RESPONSES, SALTED, UNSALTED, Tenancy

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
APART, ALONE = (Tenancy(has_tenants=has, secret=b"secret") for has in (True, False))
ANY, ANY_ALONE = (
    Tenancy(has_tenants=has, secret=b"secret", is_any_server=True) for has in (True, False)
)


def written(
    fields: dict[str, Any], path: str, *, tenant: str = "", has_media: bool = False
) -> dict[str, Any]:
    """Return the written body; the server has tenants if the request has one."""
    body = json.dumps(fields).encode()
    found: dict[str, Any] = json.loads(
        (APART if tenant else ALONE).write(body, path, tenant=tenant, has_media=has_media)
    )
    return found


@given(fields=st.dictionaries(st.text(max_size=8), _JSON), path=st.sampled_from(sorted(SALTED)))
def test_only_salt_and_store_change(fields: dict[str, Any], path: str) -> None:
    found = written(fields, path, tenant="a", has_media=True)
    others = {name: value for name, value in found.items() if name not in ("cache_salt", "store")}
    assert others == {k: v for k, v in fields.items() if k not in ("cache_salt", "store")}
    assert ("store" in found) == (path == RESPONSES or "store" in fields)


@given(fields=st.dictionaries(st.text(max_size=8), _JSON), path=st.sampled_from(sorted(SALTED)))
def test_without_tenants_and_media_nothing_changes(fields: dict[str, Any], path: str) -> None:
    body = json.dumps(fields, indent=1).encode()
    assert ALONE.write(body, path, tenant="", has_media=False) == body


@pytest.mark.parametrize("path", [*sorted(SALTED), *sorted(MEMORYLESS)])
@pytest.mark.parametrize("has_media", [False, True])
def test_bodies_that_are_written_are_known_before(path: str, has_media: bool) -> None:
    unsalted = Tenancy(has_tenants=True, secret=b"secret", has_salt=False)
    for tenancy in (APART, ALONE, unsalted):
        changed = tenancy.write(b"{}", path, tenant="a", has_media=has_media) != b"{}"
        assert tenancy.writes(path, has_media=has_media) == changed


@given(fields=st.dictionaries(st.text(max_size=8), _JSON))
def test_with_tenants_a_body_without_the_fields_keeps_its_bytes(fields: dict[str, Any]) -> None:
    fields = {key: value for key, value in fields.items() if key != "cache_salt"}
    body = json.dumps(fields, indent=1).encode() + b" \n"
    found = APART.write(body, "/v1/completions", tenant="a", has_media=False)
    salted = re.sub(rb',?"cache_salt":"[0-9a-f]{64}"(?=} \n\Z)', b"", found)
    assert (salted, len(found)) == (body, len(body) + 80 - (not fields))


@pytest.mark.parametrize("path", sorted(SALTED))
def test_each_tenant_has_a_salt_that_no_client_replaces(path: str) -> None:
    salts = {
        written({"x": 1, **own}, path, tenant=tenant)["cache_salt"]
        for tenant in ("a", "b")
        for own in (
            {},
            {"cache_salt": "mine"},
            {"cache_salt": APART.salt_of("b")},
            {"cache_salt": 7},
        )
    }
    assert len(salts) == 8
    assert all(len(salt) == 64 and not set(salt) & set("@/\\\0") for salt in salts)
    assert written({"cache_salt": None}, path, tenant="a")["cache_salt"] == APART.salt_of("a")


def test_names_that_end_alike_are_apart() -> None:
    assert APART.salt_of("ab", b"c") != APART.salt_of("a", b"bc")


def test_salt_of_another_secret_differs() -> None:
    """A client that knows the name of another tenant does not know that tenant's salt."""
    other = Tenancy(has_tenants=True, secret=b"another")
    assert other.salt_of("a") != APART.salt_of("a")


def test_default_tenant_beside_tenants_is_salted_and_has_no_stored_responses() -> None:
    salts = {
        json.loads(APART.write(body, "/v1/completions", tenant="", has_media=False))["cache_salt"]
        for body in (b"{}", b'{"cache_salt": "x"}', b'{"cache_salt": "%s"}' % (b"0" * 64))
    }
    assert len(salts) == 3
    assert salts.isdisjoint({"x", "0" * 64})
    body = b'{"input": "x", "store": true}'
    assert json.loads(APART.write(body, RESPONSES, tenant="", has_media=False))["store"] is False
    with pytest.raises(ResponseNotFound):
        APART.write(b'{"previous_response_id": "r"}', RESPONSES, tenant="", has_media=False)


UNUSUAL = [
    b'"n": NaN',
    b'"n": [Infinity, -Infinity]',
    b'"text": "\\ud800"',
    b'"\\ud83d": 1',
    b'"\xed\xa0\x80": 1',
    b'"deep": ' + b"[" * 900 + b"]" * 900,
]
"""Members that Python's parser accepts, and so vLLM."""


@pytest.mark.parametrize("member", UNUSUAL)
@pytest.mark.parametrize("path", ["/v1/completions", RESPONSES])
def test_unusual_json_is_salted_like_any_other(member: bytes, path: str) -> None:
    body = b'{"cache_salt": "theirs", ' + member + b', "store": true}'
    found = json.loads(APART.write(body, path, tenant="a", has_media=False))
    assert found["cache_salt"] == APART.salt_of("a", b"theirs")
    assert found["store"] is (path != RESPONSES)
    own = json.loads(body)
    assert repr({**found, "cache_salt": 0, "store": 0}) == repr(
        {**own, "cache_salt": 0, "store": 0}
    )
    continued = b'{"previous_response_id": "r", ' + member + b"}"
    with pytest.raises(ResponseNotFound):
        APART.write(continued, RESPONSES, tenant="a", has_media=False)
    added = APART.write(b"{ " + member + b" }", path, tenant="a", has_media=False)
    assert added.startswith(b"{ " + member + b' ,"cache_salt":"')


@given(
    st.binary(max_size=40)
    | st.text(alphabet='{}[]",:\\ud80an0-NaN \n').map(lambda text: text.encode())
)
def test_python_reads_no_body_that_was_passed_without_a_salt(body: bytes) -> None:
    try:
        found = APART.write(body, "/v1/completions", tenant="a", has_media=False)
    except InvalidRequest:
        return
    try:
        read = json.loads(found)
    except (ValueError, RecursionError):
        return  # vLLM refuses it
    assert read["cache_salt"] == APART.salt_of("a", b"") or b"cache_salt" in body


@pytest.mark.parametrize(
    ("tenant", "has_media", "store"), [("", False, True), ("a", False, False), ("", True, False)]
)
def test_store_is_false_where_what_is_stored_could_not_be_used(
    tenant: str, has_media: bool, store: bool
) -> None:
    found = written({"input": "x", "store": True}, RESPONSES, tenant=tenant, has_media=has_media)
    assert found["store"] is store
    found = written({"input": "x"}, RESPONSES, tenant=tenant, has_media=has_media)
    assert found.get("store", True) is store


def test_a_tenant_has_no_stored_responses() -> None:
    fields = {"input": "x", "previous_response_id": "resp_1"}
    with pytest.raises(ResponseNotFound, match="where tenants are configured"):
        written(fields, RESPONSES, tenant="a")
    assert written(fields, RESPONSES) == fields
    assert written(fields, RESPONSES, has_media=True) == {**fields, "store": False}
    written({**fields, "previous_response_id": None}, RESPONSES, tenant="a")
    for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/cancel"):
        with pytest.raises(ResponseNotFound):
            APART.check_path(path)
        ALONE.check_path(path)
    APART.check_path(RESPONSES)
    APART.check_path("/v1/responses/render")


@pytest.mark.parametrize(
    "path",
    [
        "//v1/chat/completions",
        "/v1//chat/completions",
        "/v1/chat/completions/",
        "/v1/./chat/completions",
        "/x/../v1/chat/completions",
        "/v1%2Fchat/completions",  # was %252F
        "/v1;a=b/chat/completions",
        "/v1/chat/completions;a",
        "/V1/chat/completions",
        "/v1\\chat\\completions",
        "/v1/chat/completions\n",
        "/v1/chat/completions ",
        "/prefix/v1/chat/completions",
        "//v1/responses/resp_1",
        "/v1/responses/resp_1/cancel/",
        "/v1/responses/resp_1/cancel\n",
        "/v1/responses/render/../resp_1",
        "/v1/responses//render/x",
        "/prefix/v1/responses/resp_1",
        "/v1/Responses/resp_1",
        "/v1/x/../responses/resp_1",
        "/score/",
    ],
)
def test_other_spellings_of_paths_are_refused_for_tenants(path: str) -> None:
    with pytest.raises(InvalidRequest):
        APART.check_path(path)
    ALONE.check_path(path)


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/a/b", "/v1/audio/transcriptions", "/tokenize", "/", "/ping/"]
)
def test_paths_of_endpoints_without_memory_pass(path: str) -> None:
    APART.check_path(path)


@pytest.mark.parametrize("path", sorted(TABLE.keys() - UNSALTED.keys() | SALTED | MEMORYLESS))
def test_known_endpoints_take_json_with_tenants(path: str) -> None:
    APART.check_path(path, has_json=True)


@pytest.mark.parametrize(
    "path", ["/v1/new", "/collective_rpc", "/v1/load_lora_adapter", "/v1/models"]
)
def test_unknown_endpoints_take_no_json_with_tenants(path: str) -> None:
    with pytest.raises(UnsupportedParameter, match="keep tenants apart"):
        APART.check_path(path, has_json=True)
    ALONE.check_path(path, has_json=True)


@pytest.mark.parametrize("path", sorted((TABLE.keys() | SALTED) - UNSALTED.keys()))
def test_every_endpoint_with_media_or_salt_passes(path: str) -> None:
    APART.check_path(path)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/files", "/v1/files/file-1/content", "/v1/batches", "/v1/conversations/conv_1"),
        *("/v1/chat/completions", "/v1/chat/completions/id", "/v1/vector_stores", "/v1/new"),
        *("/v1/models/../files", "/v1/responses", "/V1/Files"),
    ],
)
def test_what_any_server_may_store_is_refused_for_tenants(path: str) -> None:
    """Its lists and contents are those of all tenants: the server knows one key only."""
    with pytest.raises(UnsupportedParameter, match="keep tenants apart"):
        ANY.check_path(path)
    ANY_ALONE.check_path(path)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", "/v1/models"), ("HEAD", "/v1/models/a/b"), ("GET", "/health"), ("GET", "/")),
        ("POST", "/v1/audio/transcriptions"),
    ],
)
def test_what_any_server_has_for_all_passes(method: str, path: str) -> None:
    ANY.check_path(path, method=method)


@pytest.mark.parametrize(
    ("method", "path"),
    [("DELETE", "/v1/models/a"), ("POST", "/v1/models"), ("GET", "/v1/audio/transcriptions")],
)
def test_what_changes_any_server_is_refused_for_tenants(method: str, path: str) -> None:
    with pytest.raises(UnsupportedParameter, match="keep tenants apart"):
        ANY.check_path(path, method=method)
    ANY_ALONE.check_path(path, method=method)


def test_any_server_gets_json_at_known_endpoints() -> None:
    ANY.check_path("/v1/chat/completions", method="POST", has_json=True)
    with pytest.raises(UnsupportedParameter, match="keep tenants apart"):
        ANY.check_path("/v1/batches", method="POST", has_json=True)


@pytest.mark.parametrize("path", sorted(UNSALTED))
def test_endpoint_without_a_salt_is_refused_with_tenants(path: str) -> None:
    with pytest.raises(UnsupportedParameter, match="use /v1/"):
        APART.check_path(path)
    ALONE.check_path(path)


BROKEN = [
    *(b"", b"[1]", b"nonsense", b'"x"', b"{", b'{"a"', b'{"a":', b'{"a": NaN,}', b"{NaN: 1}"),
    *(b'{"a": NaN} x', b'{"\xff": 1}', b'{"a": 1 "b": 2}', b'{"a":' + b"[" * 100_000 + b"1}"),
]


@pytest.mark.parametrize("body", BROKEN)
def test_body_that_is_no_object_is_refused_where_a_field_has_to_be_written(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        APART.write(body, RESPONSES, tenant="a", has_media=False)
    assert ALONE.write(body, RESPONSES, tenant="", has_media=False) == body
    assert APART.write(body, "/v1/other", tenant="a", has_media=False) == body


def test_upstream_without_salts_gets_none_and_stored_responses_stay_apart() -> None:
    unsalted = Tenancy(has_tenants=True, secret=b"secret", has_salt=False)
    body = b'{"model": "m", "cache_salt": "mine"}'
    assert unsalted.write(body, "/v1/chat/completions", tenant="a", has_media=True) == body
    written = unsalted.write(b'{"model": "m"}', RESPONSES, tenant="a", has_media=False)
    assert json.loads(written) == {"model": "m", "store": False}
    with pytest.raises(ResponseNotFound):
        unsalted.check_path(f"{RESPONSES}/resp_1")
