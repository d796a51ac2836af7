"""Conformance checks of the promises of `afferent.tier.protocol`, for authors of tiers.

`CHECKS_OF_TIERS` names them. With pytest, for example:

    @pytest.mark.parametrize("name", CHECKS_OF_TIERS)
    def test_my_tier(name: str) -> None:
        check_tier(name, MyTier("mine://host"))

The tier is real, and may contain other values. A check deletes its own values, or lets them expire
within a minute. A broken promise raises `NotConforming`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from afferent.conformance.engine_trial import NotConforming, require
from afferent.errors import TierUnavailable
from afferent.tier.protocol import PART_NBYTES, Claims, Tier, Value, Wanted
from afferent.types import KiB

_TTL_S = 60.0
_TIMEOUT_S = 20.0
_SIZES = (1, PART_NBYTES - 1, PART_NBYTES, PART_NBYTES + 1, 3 * PART_NBYTES + 77)


def check_tier(name: str, tier: Tier) -> None:
    """Run one of `CHECKS_OF_TIERS`.

    Raises:
        NotConforming: The tier does not keep that promise.
        TierUnavailable: It does not answer.
    """
    _CHECKS[name](tier)


def _soon() -> float:
    return time.monotonic() + _TIMEOUT_S


def _value(nbytes: int, head: bytes = b"head") -> Value:
    return Value(secrets.token_bytes(32), head, memoryview(secrets.token_bytes(nbytes)))


def _put(tier: Tier, *values: Value, ttl_s: float = _TTL_S) -> None:
    were_put = tier.put_many(values, ttl_s=ttl_s, deadline_s=_soon())
    require(were_put == [True] * len(values), "put_many writes what there is room for")


def _get(tier: Tier, values: Sequence[Value]) -> list[bytes | None]:
    wanted = [Wanted(value.name, memoryview(bytearray(len(value.body)))) for value in values]
    were_read = tier.get_many_into(wanted, deadline_s=_soon())
    require(len(were_read) == len(wanted), "get_many_into answers for each value")
    return [
        bytes(one.target) if was_read else None
        for one, was_read in zip(wanted, were_read, strict=True)
    ]


def _delete(tier: Tier, *values: Value) -> int:
    return tier.delete_many([value.name for value in values], deadline_s=_soon())


def absent_is_an_answer(tier: Tier) -> None:
    """Check that all calls report values that were never put as absent."""
    value = _value(100)
    require(tier.exists_many([], deadline_s=_soon()) == [], "no names, no answers")
    require(tier.exists_many([value.name], deadline_s=_soon()) == [None], "exists_many: absent")
    require(_get(tier, [value]) == [None], "get_many_into: absent is no error")
    require(_delete(tier, value) == 0, "delete_many counts what was there")


def what_was_put_is_there_whole(tier: Tier) -> None:
    """Check values of all sizes and headers, and the order of results."""
    heads = [b"", bytes(range(256)), secrets.token_bytes(64 * KiB), b"\r\n$-1\r\n", b"h"]
    values = [_value(nbytes, head) for nbytes, head in zip(_SIZES, heads, strict=True)]
    missing = _value(10)
    _put(tier, *values)
    asked = [values[0], missing, *values[1:]]
    found = tier.exists_many([value.name for value in asked], deadline_s=_soon())
    there = [None if one is None else (one.head, one.nbytes) for one in found]
    expected = [None if v is missing else (v.head, len(v.body)) for v in asked]
    require(there == expected, "exists_many gives heads and lengths, in order")
    bodies = [None if value is missing else bytes(value.body) for value in asked]
    require(_get(tier, asked) == bodies, "get_many_into reads bodies into their places")
    require(_delete(tier, *values) == len(values), "delete_many deletes")


def many_at_once(tier: Tier) -> None:
    """Check 64 values in one call."""
    values = [_value(1000 + index, b"%d" % index) for index in range(64)]
    _put(tier, *values)
    found = tier.exists_many([value.name for value in values], deadline_s=_soon())
    require([f.head if f else None for f in found] == [v.head for v in values], "all are found")
    require(_get(tier, values) == [bytes(v.body) for v in values], "all are read")
    _delete(tier, *values)


def what_is_deleted_is_absent(tier: Tier) -> None:
    """Check that only deleted values are absent."""
    gone, stays = _value(2 * PART_NBYTES), _value(10)
    _put(tier, gone, stays)
    require(_delete(tier, gone) == 1, "delete_many counts")
    found = tier.exists_many([gone.name, stays.name], deadline_s=_soon())
    require(found[0] is None and found[1] is not None, "only what is named is deleted")
    require(_get(tier, [gone, stays])[0] is None, "what is deleted is not read")
    _delete(tier, stays)


def parts_are_told_in_order(tier: Tier) -> None:
    """Check that parts are reported in order, and that a refused value ends alone."""
    refused, taken = _value(4 * PART_NBYTES), _value(2 * PART_NBYTES + 5)
    _put(tier, refused, taken)
    told: list[int] = []
    target = memoryview(bytearray(len(taken.body)))

    def accept(index: int) -> bool:
        told.append(index)
        at = slice(index * PART_NBYTES, (index + 1) * PART_NBYTES)
        return target[at] == taken.body[at]

    wanted = [
        Wanted(refused.name, memoryview(bytearray(len(refused.body))), lambda index: index < 1),
        Wanted(taken.name, target, accept),
    ]
    were_read = tier.get_many_into(wanted, deadline_s=_soon())
    require(were_read == [False, True], "a part that is refused ends its value, and no other")
    require(told == [0, 1, 2], "parts are told in order, each once")
    _delete(tier, refused, taken)


def another_length_is_not_read(tier: Tier) -> None:
    """Check that a value is not read into a target of another length."""
    value = _value(1000)
    _put(tier, value)
    for nbytes in (999, 1001, PART_NBYTES + 1):
        wanted = Wanted(value.name, memoryview(bytearray(nbytes)))
        require(tier.get_many_into([wanted], deadline_s=_soon()) == [False], "lengths must agree")
    require(_get(tier, [value]) == [bytes(value.body)], "it is still there")
    _delete(tier, value)


def it_ends_by_the_deadline(tier: Tier) -> None:
    """Check that calls end by their deadline, at once if it is over."""
    value, start_s = _value(PART_NBYTES), time.monotonic()
    calls: list[Callable[[float], object]] = [
        lambda at: tier.exists_many([value.name], deadline_s=at),
        lambda at: tier.put_many([value], ttl_s=_TTL_S, deadline_s=at),
        lambda at: tier.health(deadline_s=at),
    ]
    for call in calls:
        try:
            call(start_s - 1.0)
        except TierUnavailable:
            continue
        raise NotConforming("what can't be done in time raises TierUnavailable")
    require(time.monotonic() - start_s < 5.0, "a deadline that is over takes no time")
    require(tier.exists_many([], deadline_s=_soon()) == [], "and then it goes on")


def values_end(tier: Tier) -> None:
    """Check that values expire."""
    value = _value(100)
    _put(tier, value, ttl_s=0.2)
    until_s = _soon()
    while tier.exists_many([value.name], deadline_s=_soon()) != [None]:
        require(time.monotonic() < until_s, "a value ends after its time")
        time.sleep(0.05)


def names_are_listed(tier: Tier) -> None:
    """Check that all existing names are listed, and no deleted ones."""
    values = [_value(PART_NBYTES + 1), *(_value(10) for _ in range(20))]
    _put(tier, *values)
    listed = list(tier.names(deadline_s=_soon()))
    require({value.name for value in values} <= set(listed), "names lists all values")
    require(len(set(listed)) == len(listed), "each once")
    _delete(tier, *values)
    left = set(tier.names(deadline_s=_soon()))
    require(left.isdisjoint({value.name for value in values}), "and none that are gone")


def threads_share_it(tier: Tier) -> None:
    """Check that four threads read the values that they wrote."""

    def work(number: int) -> bool:
        for _ in range(8):
            value = _value(PART_NBYTES // 2 * (number + 1))
            _put(tier, value)
            if _get(tier, [value]) != [bytes(value.body)]:
                return False
            _delete(tier, value)
        return True

    with ThreadPoolExecutor(4) as threads:
        require(all(threads.map(work, range(4))), "threads do not hear one another's answers")


def it_says_how_it_is(tier: Tier) -> None:
    """Check that the tier describes its health."""
    require(bool(tier.health(deadline_s=_soon()).about), "health says what it is")


def claims_are_one_holders(tier: Tier) -> None:
    """Check claims, if the tier supports them: held until released or expired."""
    if not isinstance(tier, Claims):
        return
    names = [secrets.token_bytes(32), secrets.token_bytes(32)]

    def claim(holder: bytes, ttl_s: float = 30.0) -> list[bool]:
        return tier.claim_many(names, holder=holder, ttl_s=ttl_s, deadline_s=_soon())

    require(claim(b"one") == [True, True], "the first holder gets the claims")
    require(claim(b"two") == [False, False], "no other holder gets them")
    tier.release_many(names, holder=b"two", deadline_s=_soon())
    require(claim(b"two") == [False, False], "a holder releases its own claims only")
    tier.release_many(names[:1], holder=b"one", deadline_s=_soon())
    require(claim(b"two", ttl_s=0.2) == [True, False], "what is given back is free")
    until_s = _soon()
    while not claim(b"three", ttl_s=0.2)[0]:
        require(time.monotonic() < until_s, "a claim ends by itself")
        time.sleep(0.05)
    tier.release_many(names, holder=b"one", deadline_s=_soon())


_CHECKS: dict[str, Callable[[Tier], None]] = {
    check.__name__: check
    for check in (
        absent_is_an_answer,
        what_was_put_is_there_whole,
        many_at_once,
        what_is_deleted_is_absent,
        parts_are_told_in_order,
        another_length_is_not_read,
        it_ends_by_the_deadline,
        values_end,
        names_are_listed,
        threads_share_it,
        it_says_how_it_is,
        claims_are_one_holders,
    )
}
CHECKS_OF_TIERS = tuple(_CHECKS)
"""Names of the checks."""
