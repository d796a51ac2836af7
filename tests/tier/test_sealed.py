"""Sealed headers: a valid header is read back, and every other one is refused."""

from __future__ import annotations

import random

import pytest

from afferent.errors import FormatError
from afferent.tier.protocol import PART_NBYTES, num_parts, part
from afferent.tier.sealed import VERSION, Sealer
from afferent.types import ContentKey, ObjectKind

KEY, OTHER = ContentKey(b"k" * 32), ContentKey(b"o" * 32)
BODY = memoryview(random.Random(1).randbytes(2 * PART_NBYTES + 5))
SEALERS = [Sealer(), Sealer(b"a secret of the fleet")]


@pytest.mark.parametrize("sealer", SEALERS)
@pytest.mark.parametrize("nbytes", [1, PART_NBYTES, PART_NBYTES + 1, len(BODY)])
def test_what_was_sealed_is_what_is_read(sealer: Sealer, nbytes: int) -> None:
    body = BODY[:nbytes]
    head = sealer.open(sealer.seal(KEY, ObjectKind.EMBEDDINGS, body), KEY)
    assert (head.key, head.kind, head.nbytes) == (KEY, ObjectKind.EMBEDDINGS, nbytes)
    assert all(head.has(index, part(body, index)) for index in range(num_parts(nbytes)))
    assert len(head.digests) == num_parts(nbytes)


def test_a_part_in_another_place_is_another_part() -> None:
    sealer = Sealer()
    head = sealer.open(sealer.seal(KEY, ObjectKind.FEATURES, BODY), KEY)
    assert not head.has(0, part(BODY, 1))
    assert not head.has(2, part(BODY, 2)[:-1])


@pytest.mark.parametrize("sealer", SEALERS)
def test_no_flipped_bit_is_believed(sealer: Sealer) -> None:
    head = sealer.seal(KEY, ObjectKind.FEATURES, BODY[:1000])
    for bit in range(8 * len(head)):
        flipped = bytearray(head)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            sealer.open(bytes(flipped), KEY)


@pytest.mark.parametrize("sealer", SEALERS)
def test_no_piece_of_a_head_is_one(sealer: Sealer) -> None:
    head = sealer.seal(KEY, ObjectKind.FEATURES, BODY)
    for end in range(len(head)):
        with pytest.raises(FormatError):
            sealer.open(head[:end], KEY)
    with pytest.raises(FormatError):
        sealer.open(head + b"\0", KEY)


def test_another_keys_head_is_refused() -> None:
    head = Sealer().seal(OTHER, ObjectKind.FEATURES, BODY)
    with pytest.raises(FormatError, match="another key"):
        Sealer().open(head, KEY)


def test_only_who_has_the_secret_can_seal() -> None:
    ours, theirs, none = Sealer(b"our secret"), Sealer(b"their secret"), Sealer()
    for maker in (theirs, none):
        with pytest.raises(FormatError):
            ours.open(maker.seal(KEY, ObjectKind.FEATURES, BODY), KEY)
    with pytest.raises(FormatError, match="another way"):
        none.open(ours.seal(KEY, ObjectKind.FEATURES, BODY), KEY)


def test_fleets_of_different_secrets_do_not_meet() -> None:
    names = {sealer.name_of(KEY) for sealer in (Sealer(), Sealer(b"one"), Sealer(b"two"))}
    assert len(names) == 3
    assert Sealer(b"one").name_of(KEY) in names
    assert Sealer(b"one").name_of(OTHER) not in names
    assert KEY not in names


def test_the_form_is_as_it_is_written_down() -> None:
    """A change of the format needs a new version: nodes with both formats may share a tier."""
    assert VERSION == 1
    head = Sealer().seal(KEY, ObjectKind.FEATURES, memoryview(b"body"))
    assert head[:56] == (
        b"AFF-TIER" + b"\1\0" + b"\0\0" + b"\1\0\0\0" + (4).to_bytes(8, "little") + KEY
    )
    assert len(head) == 56 + 32 + 32
    keyed = Sealer(b"secret").seal(KEY, ObjectKind.FEATURES, memoryview(b"body"))
    assert (keyed[10], keyed[56:88], keyed[88:] != head[88:]) == (1, head[56:88], True)
