"""A tier that returns wrong data: values are verified, and wrong ones deleted."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from afferent.errors import TierUnavailable
from afferent.tier import vault as vault_module
from afferent.tier.claims import HeldClaims
from afferent.tier.protocol import PART_NBYTES, Tier, Value
from afferent.tier.sealed import Sealer
from afferent.tier.vault import REJECTED, Body, Vault, Wish
from afferent.types import ContentKey, ObjectKind
from tests.tier.lying import Lying

KEY, OTHER = ContentKey(b"k" * 32), ContentKey(b"o" * 32)
FEATURES = ObjectKind.FEATURES
BODY = memoryview(random.Random(2).randbytes(3 * PART_NBYTES + 9))
LONG_S = 1e9


@pytest.fixture
def lying() -> Lying:
    return Lying()


@pytest.fixture
def vault(lying: Lying) -> Iterator[Vault]:
    tier: Tier = lying
    vault = Vault(tier, Sealer(b"a secret of the fleet"))
    yield vault
    vault.close()


def put(vault: Vault, key: ContentKey = KEY, body: memoryview = BODY) -> None:
    assert vault.put([Body(key, FEATURES, body)], ttl_s=60, deadline_s=LONG_S) != ["full"]


def fetch(vault: Vault, *keys: ContentKey) -> list[bytes | None]:
    heads = vault.look_up(keys, deadline_s=LONG_S)
    assert None not in heads
    wishes = [Wish(head, memoryview(bytearray(len(BODY)))) for head in heads if head is not None]
    were_good = vault.fetch(wishes, deadline_s=LONG_S)
    return [
        bytes(wish.target[: wish.head.nbytes]) if is_good else None
        for wish, is_good in zip(wishes, were_good, strict=True)
    ]


def rejected(what: str) -> float:
    return REJECTED.labels(what).values[0]


def test_what_was_put_is_fetched(vault: Vault) -> None:
    put(vault)
    put(vault, OTHER, BODY[:100])
    assert fetch(vault, KEY, OTHER) == [bytes(BODY), bytes(BODY[:100])]
    assert vault.look_up([ContentKey(b"n" * 32)], deadline_s=LONG_S) == [None]


def test_what_is_there_is_not_written_again(vault: Vault, lying: Lying) -> None:
    put(vault)
    before = dict(lying.values)
    put(vault)
    assert lying.values == before
    assert all(lying.values[name] is value for name, value in before.items())


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("nbytes", [9, 3 * PART_NBYTES + 9])
def test_no_flipped_byte_is_fetched(vault: Vault, lying: Lying, index: int, nbytes: int) -> None:
    put(vault, body=BODY[:nbytes])
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    at = random.Random(seed).randrange(9)

    def flip(number: int, data: memoryview) -> bytes:
        changed = bytearray(data)
        if number == index or nbytes == 9:
            changed[at] ^= 0x10
        return bytes(changed)

    lying.change, before = flip, rejected("body")
    assert fetch(vault, KEY) == [None]
    assert rejected("body") == before + 1
    assert lying.values == {}, "it is deleted, and can be made anew"


def test_what_is_wrong_ends_the_reading(vault: Vault, lying: Lying) -> None:
    put(vault, body=memoryview(bytes(20 * PART_NBYTES)))
    (head,) = vault.look_up([KEY], deadline_s=LONG_S)
    assert head is not None

    def slow(index: int, data: memoryview) -> bytes:
        time.sleep(0.05)  # slower than the verification of the part before
        return bytes(len(data) - 1) + b"x"

    lying.change = slow
    wish = Wish(head, memoryview(bytearray(head.nbytes)))
    assert vault.fetch([wish], deadline_s=LONG_S) == [False]
    assert lying.num_parts_read < 10


@pytest.mark.parametrize("becomes", ["another", "absent"])
def test_value_replaced_between_header_and_body_is_not_rejected(
    vault: Vault, lying: Lying, becomes: str
) -> None:
    put(vault, body=BODY[:100])
    (head,) = vault.look_up([KEY], deadline_s=LONG_S)
    assert head is not None
    new = [Body(KEY, FEATURES, BODY[100:200])]
    vault.put(new, ttl_s=60, deadline_s=LONG_S, replaces=True)
    if becomes == "absent":
        lying.change = lambda _number, data: lying.values.clear() or bytes(data)
    before = rejected("body")
    told: set[ContentKey] = set()
    wish = Wish(head, memoryview(bytearray(100)))
    assert vault.fetch([wish], deadline_s=LONG_S, rejected=told) == [False]
    assert (rejected("body"), told) == (before, {KEY})
    if becomes == "another":
        assert fetch(vault, KEY) == [bytes(BODY[100:200])]


def test_another_keys_value_is_refused(vault: Vault, lying: Lying) -> None:
    put(vault, OTHER)
    (name,) = lying.values
    wrong = Sealer(b"a secret of the fleet").name_of(KEY)
    lying.values[wrong] = lying.values.pop(name)
    before = rejected("head")
    assert vault.look_up([KEY], deadline_s=LONG_S) == [None]
    assert (rejected("head"), lying.values) == (before + 1, {})


def test_what_was_sealed_without_the_secret_is_refused(vault: Vault, lying: Lying) -> None:
    name = Sealer(b"a secret of the fleet").name_of(KEY)
    head = Sealer().seal(KEY, FEATURES, BODY)
    lying.values[name] = Value(name, head, BODY)
    assert vault.look_up([KEY], deadline_s=LONG_S) == [None]
    assert lying.values == {}


def test_a_body_of_another_length_is_refused(vault: Vault, lying: Lying) -> None:
    put(vault)
    ((name, value),) = lying.values.items()
    lying.values[name] = Value(name, value.head, value.body[:-1])
    assert vault.look_up([KEY], deadline_s=LONG_S) == [None]
    assert lying.values == {}


def test_what_lacks_a_part_is_absent_and_deleted(vault: Vault, lying: Lying) -> None:
    put(vault)
    (head,) = vault.look_up([KEY], deadline_s=LONG_S)
    assert head is not None
    (name,) = lying.values
    lying._read = lambda _: False  # type: ignore[method-assign]
    assert vault.fetch([Wish(head, memoryview(bytearray(len(BODY))))], deadline_s=LONG_S) == [False]
    assert name not in lying.values


def test_what_came_before_the_tier_failed_counts(vault: Vault, lying: Lying) -> None:
    put(vault, OTHER, BODY[: PART_NBYTES + 1])
    put(vault)
    lying.change = lambda index, data: None if index == 2 else bytes(data)
    assert fetch(vault, OTHER, KEY) == [bytes(BODY[: PART_NBYTES + 1]), None]
    assert len(lying.values) == 2, "a link that fails says nothing of the value"
    with pytest.raises(TierUnavailable):
        fetch(vault, KEY)


def test_heads_are_listed_and_strangers_told_apart(vault: Vault, lying: Lying) -> None:
    put(vault)
    lying.values[b"x" * 32] = Value(b"x" * 32, b"of somebody else", BODY)
    listed = [head for _, head in vault.heads(timeout_s=LONG_S)]
    assert sorted(head.key if head else b"" for head in listed) == [b"", KEY]


def test_node_does_not_wait_for_a_claim_of_its_own(vault: Vault) -> None:
    """A claim that is left belongs to an object whose job failed, or that was not kept."""
    claims, others = HeldClaims(vault), HeldClaims(vault)
    assert claims.claim([(KEY, 5.0)], deadline_s=LONG_S) == [True]
    assert claims.claim([(KEY, 5.0), (OTHER, 5.0)], deadline_s=LONG_S) == [True, True]
    assert others.claim([(KEY, 5.0)], deadline_s=LONG_S) == [False]
    claims.give_back(KEY, 1.0)
    assert others.claim([(KEY, 5.0)], deadline_s=LONG_S) == [True]
    assert claims.claim([(KEY, 5.0)], deadline_s=LONG_S) == [False]


def test_heads_of_many_values_may_take_longer_than_the_timeout_of_one_answer(
    vault: Vault, lying: Lying, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [ContentKey(bytes([number]) * 32) for number in range(3)]
    for key in keys:
        put(vault, key, BODY[:9])
    now_s = 0.0

    def takes_20_s(deadline_s: float) -> None:
        nonlocal now_s
        now_s += 20.0
        if now_s > deadline_s:
            raise TierUnavailable("no answer in time")

    monkeypatch.setattr(vault_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    lying.faults["look-up"] = takes_20_s
    heads = list(vault.heads(timeout_s=30.0))
    assert {head.key for _, head in heads if head is not None} == set(keys)
    with pytest.raises(TierUnavailable):
        list(vault.heads(timeout_s=19.0))
