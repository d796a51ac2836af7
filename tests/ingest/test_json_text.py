"""A document in which a key stands twice is refused, and every other one passes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afferent.errors import InvalidRequest
from afferent.ingest.json_text import check_keys

DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=20,
)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (b'{"model": "a", "model": "b"}', "model"),
        (b'{"model": "a", "\\u006dodel": "b"}', "model"),
        (b'{"a": {"b": 1, "b": 1}}', "b"),
        (b'{"a": [1, {"": 1, "c": 2, "": 3}]}', ""),
    ],
)
def test_check_keys_duplicate_raises_invalid_request(text: bytes, key: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the key '{key}' stands twice"):
        check_keys(text)


@given(DOCUMENTS)
def test_check_keys_document_without_duplicates_passes(document: object) -> None:
    check_keys(json.dumps(document).encode())


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"a": 1, "a"', b"\xff", b"[" * 100_000, b'{"a": 1} {"a": 1}']
)
def test_check_keys_text_that_is_not_json_passes(text: bytes) -> None:
    check_keys(text)
