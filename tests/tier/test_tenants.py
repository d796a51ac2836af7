"""The amount that a node stores in the tier for each tenant."""

from __future__ import annotations

from afferent.tier.tenants import TenantBudget


def test_each_tenant_has_so_many_bytes_and_no_other_pays_for_it() -> None:
    budget = TenantBudget(1000, ttl_s=640.0, own={})
    budget.add("anna", 700, now_s=0.0)
    assert budget.has_room("anna", 300, now_s=1.0)
    assert not budget.has_room("anna", 301, now_s=1.0)
    assert budget.has_room("ben", 1000, now_s=1.0)
    assert not budget.has_room("", 1001, now_s=1.0), "the nameless are a tenant"


def test_what_has_ended_by_its_time_counts_no_more() -> None:
    budget = TenantBudget(1000, ttl_s=640.0, own={})
    budget.add("anna", 600, now_s=0.0)
    budget.add("anna", 400, now_s=320.0)
    assert not budget.has_room("anna", 1, now_s=639.0)
    assert budget.has_room("anna", 600, now_s=660.0)
    assert not budget.has_room("anna", 601, now_s=660.0)
    assert budget.has_room("anna", 1000, now_s=5000.0)


def test_a_tenant_may_have_a_limit_of_its_own() -> None:
    budget = TenantBudget(0, ttl_s=640.0, own={"anna": 100, "ben": 0})
    assert not budget.has_room("anna", 101, now_s=0.0)
    budget.add("anna", 100, now_s=0.0)
    assert not budget.has_room("anna", 1, now_s=0.0)
    budget.add("ben", 10**12, now_s=0.0)
    assert budget.has_room("ben", 10**12, now_s=0.0), "0 is as for everybody"


def test_what_is_remembered_does_not_grow() -> None:
    budget = TenantBudget(10**9, ttl_s=640.0, own={})
    for second in range(5000):
        budget.add("anna", 1, now_s=float(second))
    assert 600 <= budget._nbytes_of("anna", 5000.0) <= 660
    assert len(budget._written["anna"].spans) <= 66
