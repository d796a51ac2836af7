"""Malicious blocks cause a typed error, or a tree that lies inside of its block."""

from __future__ import annotations

import random

import numpy as np
import pytest
from msgspec.msgpack import Ext, encode

from afferent.errors import FormatError
from afferent.store.block import codec, layout
from tests.store import attacks
from tests.store.attacks import forged, tensor

_CASES_PER_KIND = 1000


@pytest.mark.parametrize("kind", attacks.KINDS)
def test_generated_attacks(kind: str) -> None:
    """Run over 10,000 cases in all; the name of a failing case is its seed."""
    accepted = 0
    for number in range(_CASES_PER_KIND):
        name = f"{kind}/{number}"
        try:
            accepted += attacks.judge(attacks.KINDS[kind](random.Random(name)))
        except Exception as error:
            pytest.fail(f"case {name}: {error!r}")
    print(f"seeds {kind}/0 to {kind}/{_CASES_PER_KIND - 1}: {accepted} accepted and sound")
    assert accepted < _CASES_PER_KIND


def test_what_is_not_an_attack_is_accepted() -> None:
    rng = random.Random("good")
    assert all(attacks.judge(attacks.good_block(rng)) for _ in range(200))
    assert attacks.judge(forged(encode([tensor("uint8", [64]), tensor("int8", [8])]), 72))


@pytest.mark.parametrize(
    ("header", "payload_nbytes"),
    [
        pytest.param(encode(tensor("uint8", [512])), 256, id="past the end"),
        pytest.param(encode(tensor("uint8", [2**62])), 256, id="far past the end"),
        pytest.param(encode(tensor("uint8", [255])), 256, id="bytes left over"),
        pytest.param(encode([tensor("uint8", [200])] * 2), 200, id="overlap"),
        pytest.param(encode(tensor("uint8", [64], 64, 64)), 64, id="an offset of its own"),
        pytest.param(encode(tensor("float8", [64])), 64, id="unknown type"),
        pytest.param(encode(tensor("object", [1])), 8, id="pointers"),
        pytest.param(encode(tensor("uint8", [2**62, 2**62, 0])), 0, id="huge, but no bytes"),
        pytest.param(encode(tensor("uint8", [-64])), 64, id="a negative side"),
        pytest.param(encode(tensor("uint8", [0] * 33)), 0, id="too many sides"),
        pytest.param(encode(Ext(7, encode(["uint8", [64]]))), 64, id="another extension"),
        pytest.param(encode(Ext(1, b"\x92\xa5uint8\x91\xcc\x40")), 64, id="a long spelling"),
        pytest.param(b"\x82\xa1a\x01\xa1a\x02", 0, id="a key twice"),
        pytest.param(b"\x81\x01\x01", 0, id="a number as key"),
        pytest.param(b"\x81\x91\x01\x01", 0, id="a list as key"),
        pytest.param(b"\xd6\xff" + bytes(4), 0, id="a time stamp"),
        pytest.param(b"\xa1\xff", 0, id="text that is not text"),
        pytest.param(b"", 0, id="nothing"),
        pytest.param(b"\x01\x01", 0, id="two trees"),
        pytest.param(b"\x91" * 65 + b"\x01", 0, id="deep"),
        pytest.param(b"\x91" * 100_000 + b"\x01", 0, id="very deep"),
        pytest.param(b"\xdd\xff\xff\xff\xff", 0, id="a huge list"),
        pytest.param(encode("x" * layout.MAX_HEADER_NBYTES), 0, id="a huge header"),
    ],
)
def test_headers_that_lie(header: bytes, payload_nbytes: int) -> None:
    with pytest.raises(FormatError):
        codec.view(memoryview(forged(header, payload_nbytes)))


def test_preludes_that_lie() -> None:
    good = bytes(attacks.good_block(random.Random("prelude")))
    assert codec.view(good)
    for wrong in (
        b"",
        good[:10],
        good[:-1],
        b"X" + good[1:],
        good[:8] + b"\x02" + good[9:],
        good[:10] + b"\x01" + good[11:],
        good[:12] + b"\xff\xff\xff\x7f" + good[16:],
        good[:16] + b"\xff" * 8 + good[24:],
        bytes(forged(encode(1), 0, total=2**40)),
        bytes(forged(encode(1), 0, total=10)),
    ):
        with pytest.raises(FormatError):
            codec.view(wrong)


def test_booleans_that_are_none() -> None:
    """Booleans must be 0 or 1: for other bytes, numpy's operations disagree about what is true."""
    tree = {"mask": np.zeros((2, 3), bool), "one": np.array(True)}
    planned = codec.plan(tree)
    block = memoryview(bytearray(b"\xff" * planned.nbytes))
    places = codec.lay_out(planned, block)
    with pytest.raises(FormatError, match="neither"):
        codec.view(block)
    places["mask"][...], places["one"][...] = True, False
    assert codec.view(block)


def test_a_writer_behind_the_readers_back() -> None:
    """A block changes after it was checked: the tree that was returned stays the same."""
    block = attacks.good_block(random.Random("shared"))
    tree = codec.view(memoryview(block))
    before = codec.plan(tree)
    block[: len(before.head)] = b"\xff" * len(before.head)
    assert codec.plan(tree) == before
