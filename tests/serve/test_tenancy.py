"""What is written into bodies so that tenants share nothing that an upstream remembers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afferent.errors import InvalidRequest, ResponseNotFound
from afferent.serve.upstream import tenancy
from afferent.serve.upstream.media_locations import TABLE
from afferent.serve.upstream.tenancy import RESPONSES, SALTED, check_path, salt_of

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def written(
    fields: dict[str, Any], path: str, *, tenant: str = "", has_media: bool = False
) -> dict[str, Any]:
    body = json.dumps(fields).encode()
    found: dict[str, Any] = json.loads(
        tenancy.written(body, path, tenant=tenant, has_media=has_media)
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
    assert tenancy.written(body, path, tenant="", has_media=False) == body


@pytest.mark.parametrize("path", sorted(SALTED))
def test_each_tenant_has_a_salt_that_no_client_replaces(path: str) -> None:
    salts = {
        written({"x": 1, **own}, path, tenant=tenant)["cache_salt"]
        for tenant in ("a", "b")
        for own in ({}, {"cache_salt": "mine"}, {"cache_salt": salt_of("b")}, {"cache_salt": 7})
    }
    assert len(salts) == 8
    assert all(len(salt) == 64 and not set(salt) & set("@/\\\0") for salt in salts)
    assert written({"cache_salt": None}, path, tenant="a")["cache_salt"] == salt_of("a")


def test_names_that_end_alike_are_apart() -> None:
    assert salt_of("ab", "c") != salt_of("a", "bc")


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
            check_path(path, "a")
        check_path(path, "")
    check_path(RESPONSES, "a")
    check_path("/v1/responses/render", "a")


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
        check_path(path, "a")
    check_path(path, "")


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/a/b", "/v1/audio/transcriptions", "/tokenize", "/", "/ping/"]
)
def test_paths_of_endpoints_without_memory_pass(path: str) -> None:
    check_path(path, "a")


@pytest.mark.parametrize("path", sorted(TABLE.keys() | SALTED))
def test_every_endpoint_with_media_or_salt_passes(path: str) -> None:
    check_path(path, "a")


@pytest.mark.parametrize("body", [b"", b"[1]", b"nonsense", b'"x"', b"{"])
def test_what_is_no_object_passes(body: bytes) -> None:
    assert tenancy.written(body, RESPONSES, tenant="a", has_media=False) == body
