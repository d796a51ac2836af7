"""The fair order of requests that are served in small units."""

from __future__ import annotations

from collections import Counter

import pytest

from afferent.admission.served import Served
from afferent.admission.shares import NAMELESS, Share


def serve(served: Served[str], entered: dict[str, Share], num: int) -> Counter[str]:
    """Serve the first request one unit at a time; return the units of each."""
    had: Counter[str] = Counter()
    for _ in range(num):
        first = min(entered, key=lambda each: served.rank(each, entered[each]))
        served.charge(first, entered[first], 1)
        had[first] += 1
    return had


def enter(served: Served[str], **requests: Share) -> dict[str, Share]:
    for request, share in requests.items():
        served.enter(request, share)
    return requests


def test_requests_of_a_tenant_get_as_much_as_each_other() -> None:
    served: Served[str] = Served()
    assert serve(served, enter(served, a=NAMELESS, b=NAMELESS), 100) == {"a": 50, "b": 50}


def test_request_that_comes_later_neither_waits_nor_makes_others_wait() -> None:
    served: Served[str] = Served()
    entered = enter(served, a=NAMELESS, b=NAMELESS)
    serve(served, entered, 100)
    entered |= enter(served, c=NAMELESS)
    had = serve(served, entered, 99)
    assert set(had.values()) == {33}


def test_tenants_get_work_by_weight() -> None:
    served: Served[str] = Served()
    entered = enter(served, a=Share("heavy", 3.0), b=Share("flood"), c=Share("flood"))
    had = serve(served, entered, 400)
    assert had["a"] == pytest.approx(300, abs=1)
    assert had["b"] == pytest.approx(had["c"], abs=1)


def test_address_pays_where_there_is_no_tenant() -> None:
    served: Served[str] = Served()
    one, other = Share(address="192.0.2.1"), Share(address="192.0.2.2")
    entered = enter(served, a=one, b=one, c=one, d=other)
    assert serve(served, entered, 120)["d"] == 60
    named = [Share("acme", address=address) for address in ("192.0.2.1", "192.0.2.2")]
    assert named[0].payer == named[1].payer, "a tenant may have many addresses"


def test_parts_of_a_request_leave_one_by_one() -> None:
    served: Served[str] = Served()
    for _ in range(2):
        served.enter("a", NAMELESS)
    served.charge("a", NAMELESS, 5)
    served.leave("a", NAMELESS)
    assert served.rank("a", NAMELESS) == (5, 5)
    served.leave("a", NAMELESS)
    with pytest.raises(KeyError):
        served.rank("a", NAMELESS)


def test_tenant_that_ends_all_its_requests_has_no_debt() -> None:
    served: Served[str] = Served()
    entered = enter(served, a=Share("one"), b=Share("other"))
    serve(served, entered, 10)
    for _ in range(100):
        served.charge("a", Share("one"), 1)
    served.leave("a", Share("one"))
    served.enter("c", Share("one"))
    assert served.rank("c", Share("one"))[0] == served.rank("b", Share("other"))[0]
