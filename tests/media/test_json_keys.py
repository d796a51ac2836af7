"""A document with a duplicate key is refused, and every other one passes."""

from __future__ import annotations

import itertools
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afferent.errors import InvalidRequest
from afferent.media.body.json_keys import KeyCheck, check_keys
from tests.callbacks import GOAL_MS, measured
from tests.collector import frozen

DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=20,
)
TWICE = [
    (b'{"model": "a", "model": "b"}', "model"),
    (b'{"model": "a", "\\u006dodel": "b"}', "model"),
    (b'{"a": {"b": 1, "b": 1}}', "b"),
    (b'{"a": [1, {"": 1, "c": 2, "": 3}]}', ""),
    (b'{"a": ["]", 1, 2], "b": "{,", "a": 0}', "a"),
    (b'{"a\\\\": {}, "b": [[], {}], "a\\\\": 0}', "a\\\\"),
    (b'{"\\ud800": 1, "\\uD800": 1}', "\\ud800"),
    ('{"é": 1, "\\u00e9": 1}'.encode(), "é"),
]


def check(text: bytes) -> int:
    """Return the number of steps."""
    return len(list(check_keys(text)))


def check_in_pieces(text: bytes, size: int) -> None:
    keys = KeyCheck()
    for start in range(0, len(text), size):
        keys.feed(text[start : start + size])


@pytest.mark.parametrize(("text", "key"), TWICE)
def test_check_keys_duplicate_raises_invalid_request(text: bytes, key: str) -> None:
    with pytest.raises(InvalidRequest, match="stands twice") as raised:
        check(text)
    assert key in str(raised.value)


@pytest.mark.parametrize("text", [text for text, _ in TWICE])
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_check_of_pieces_duplicate_raises_invalid_request(text: bytes, size: int) -> None:
    with pytest.raises(InvalidRequest, match="stands twice"):
        check_in_pieces(text, size)
    with pytest.raises(InvalidRequest, match="stands twice"):
        check(b'{"long": "' + b"x" * 100_000 + b'", "inner": ' + text + b"}")


@given(DOCUMENTS, st.integers(1, 5))
def test_check_keys_document_without_duplicates_passes(document: object, size: int) -> None:
    for is_ascii in (False, True):
        text = json.dumps(document, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
        check(text)
        check_in_pieces(text, size)


@given(
    st.lists(st.sampled_from(['"a"', '"b"', '"\\u0061"', '"a\\\\"', '"\\""']), max_size=5),
    st.sampled_from(["0", "[1, 2]", '"a"', '"\\"a\\":,"', '{"a": 1}', "[{}, {}]"]),
    st.integers(1, 9),
)
def test_check_of_pieces_finds_what_check_of_whole_text_finds(
    keys: list[str], value: str, size: int
) -> None:
    text = ("{" + ", ".join(f"{key}: {value}" for key in keys) + "}").encode()
    is_double = len(json.loads(text)) < len(keys)
    for call in (lambda: check(text), lambda: check_in_pieces(text, size)):
        if is_double:
            with pytest.raises(InvalidRequest):
                call()
        else:
            call()


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"a": 1, "a"', b"\xff", b"[" * 100_000, b'{"a": 1} {"a": 1}', b"]}," * 9]
)
def test_check_keys_text_that_is_not_json_passes(text: bytes) -> None:
    check(text)


def test_check_keys_deeper_than_checked_stays_in_step() -> None:
    depth = 70_000
    text = b'{"a": ' + b"[" * depth + b'{"b": 1, "b": 1}' + b"]" * depth + b', "a": 1}'
    with pytest.raises(InvalidRequest, match="the key 'a' stands twice"):
        check(text)


def test_check_keys_of_a_text_with_many_keys_or_a_long_one_has_a_bound() -> None:
    many = b"{" + b",".join(b'"%d":0' % number for number in range(300_000)) + b"}"
    for text in (many, b'{"' + b"k" * 100_000 + b'": 0}'):
        with pytest.raises(InvalidRequest, match="has more than"):
            check(text)


@pytest.mark.parametrize("unit", [b"{},", b"[],", b'"",', b'{"a":0},', b"1,", b'{"":[{}]},'])
@pytest.mark.parametrize("nbytes", [60_000, 2_000_000])
def test_steps_of_check_keys_are_short(unit: bytes, nbytes: int) -> None:
    """The C parser blocked the event loop for seconds, even from within another thread."""
    text = b"[" + unit * (nbytes // len(unit)) + b"0]"
    with frozen(), measured() as cost:
        times_s = [time.thread_time()]
        times_s += [time.thread_time() for _ in check_keys(text)]
        times_s.append(time.thread_time())
    longest_s = max(after - before for before, after in itertools.pairwise(times_s))
    assert longest_s < 2 * GOAL_MS / 1e3 * cost.slowness
    assert len(times_s) > 2 or len(text) < 64 << 10
