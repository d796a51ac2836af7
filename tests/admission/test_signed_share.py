"""The signed header in which a gateway names the tenant of a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afferent.admission.shares import NAMELESS, Share
from afferent.admission.signed_share import VALID_S, SignedShares
from afferent.errors import NotAuthenticated

SECRET = b"a secret of the fleet 0123456789"

shares = st.builds(
    Share,
    tenant=st.text(max_size=128),
    weight=st.floats(min_value=1e-6, max_value=1e6),
    address=st.text(max_size=64),
)


@given(shares)
def test_share_is_read_as_it_was_signed(share: Share) -> None:
    signatures = SignedShares(SECRET)
    value = signatures.sign(share)
    assert value.isascii()
    assert value.isprintable()
    assert signatures.read(value) == share


@given(st.data())
def test_no_character_can_be_changed(data: st.DataObject) -> None:
    signatures = SignedShares(SECRET, clock=lambda: 1e9)
    value = signatures.sign(Share("acme", 2.0))
    at = data.draw(st.integers(0, len(value) - 1))
    other = data.draw(st.characters().filter(lambda each: each != value[at]))
    with pytest.raises(NotAuthenticated):
        signatures.read(value[:at] + other + value[at + 1 :])


@pytest.mark.parametrize("value", ["", ".", "..", "a.b", "a.b.c", "WyJhIl0.1.00", "\xe4.\xf6.\xfc"])
def test_malformed_value_is_refused(value: str) -> None:
    with pytest.raises(NotAuthenticated):
        SignedShares(SECRET).read(value)


def test_another_secret_is_refused() -> None:
    value = SignedShares(b"another secret").sign(NAMELESS)
    with pytest.raises(NotAuthenticated, match="fleet-secret"):
        SignedShares(SECRET).read(value)


@pytest.mark.parametrize(("late_s", "is_valid"), [(-301, False), (-299, True), (299, True)])
def test_signature_is_valid_for_five_minutes(late_s: float, is_valid: bool) -> None:
    value = SignedShares(SECRET, clock=lambda: 1e9).sign(NAMELESS)
    reader = SignedShares(SECRET, clock=lambda: 1e9 + late_s)
    assert VALID_S == 300
    if is_valid:
        assert reader.read(value) == NAMELESS
        return
    with pytest.raises(NotAuthenticated, match="clocks"):
        reader.read(value)
