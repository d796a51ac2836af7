"""The encoder cache compared with a naive model that searches linearly."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from afferent.errors import EncoderCacheFull, InternalError
from afferent.schedule.encoder_cache import EncoderCache
from tests.schedule.settings import STATE_MACHINE

ROW_NBYTES = 10


def make(rows: int = 100, nbytes: int = 10_000) -> EncoderCache:
    return EncoderCache(capacity_embeds=rows, capacity_nbytes=nbytes)


def hold(cache: EncoderCache, request: str, key: bytes, rows: int = 40, nbytes: int = 0) -> bool:
    """Use an item for a request; return whether it has to be encoded."""
    plan = cache.plan(request, key, num_embeds=rows, nbytes=nbytes)
    assert plan is not None
    cache.commit(plan)
    return plan.needs_encode


def test_a_plan_changes_nothing() -> None:
    cache = make()
    for _ in range(2):
        plan = cache.plan("a", b"dog", num_embeds=100, nbytes=0)
        assert plan is not None
        assert plan.needs_encode
    assert len(cache) == cache.used_embeds == 0


def test_an_item_is_encoded_once_for_all_requests() -> None:
    cache = make()
    assert hold(cache, "a", b"dog")
    assert not hold(cache, "b", b"dog")
    assert cache.owners(b"dog") == {"a", "b"}
    assert cache.used_embeds == 40


def test_the_oldest_unreferenced_goes_first_and_is_reported_once() -> None:
    cache = make()
    for key in (b"ant", b"bee"):
        hold(cache, "a", key)
    cache.release("a", b"bee")
    cache.release("a", b"ant")
    plan = cache.plan("b", b"cat", num_embeds=30, nbytes=0)
    assert plan is not None
    assert plan.victims == (b"bee",)
    cache.commit(plan)
    assert cache.report_evicted() == [b"bee"]
    assert cache.report_evicted() == []


def test_as_many_go_as_it_takes_in_rows_and_in_bytes() -> None:
    cache = make(rows=100, nbytes=1000)
    for key, rows, nbytes in ((b"ant", 10, 300), (b"bee", 10, 300), (b"cat", 10, 300)):
        hold(cache, "a", key, rows=rows, nbytes=nbytes)
        cache.release("a", key)
    for rows, nbytes, gone in (
        (10, 100, ()),
        (10, 400, (b"ant",)),
        (10, 700, (b"ant", b"bee")),
        (81, 100, (b"ant", b"bee")),
    ):
        plan = cache.plan("b", b"new", num_embeds=rows, nbytes=nbytes)
        assert plan is not None
        assert plan.victims == gone


def test_references_block_and_say_so_with_none() -> None:
    cache = make()
    hold(cache, "a", b"ant", 80)
    assert cache.plan("b", b"bee", num_embeds=21, nbytes=0) is None
    assert cache.plan("b", b"bee", num_embeds=20, nbytes=0) is not None


def test_bytes_are_a_limit_of_their_own() -> None:
    cache = make(nbytes=100)
    hold(cache, "a", b"ant", 1, nbytes=60)
    assert cache.plan("a", b"bee", num_embeds=1, nbytes=41) is None
    cache.release("a", b"ant")
    assert hold(cache, "a", b"bee", 1, nbytes=41)
    assert cache.report_evicted() == [b"ant"]
    assert cache.used_nbytes == 41


@pytest.mark.parametrize(("rows", "nbytes"), [(101, 0), (1, 10_001)])
def test_what_can_never_fit_is_an_error(rows: int, nbytes: int) -> None:
    with pytest.raises(EncoderCacheFull, match="exceed the encoder cache"):
        make().plan("a", b"whale", num_embeds=rows, nbytes=nbytes)


def test_an_item_that_recurs_is_held_until_its_last_occurrence() -> None:
    cache = make()
    hold(cache, "a", b"dog")
    hold(cache, "a", b"dog")
    assert cache.uses("a") == {b"dog": 2}
    cache.release("a", b"dog")
    assert cache.owners(b"dog") == {"a"}
    assert cache.num_evictable == 0
    cache.release("a", b"dog")
    assert cache.owners(b"dog") == frozenset()
    assert cache.num_evictable == 1


def test_evicted_and_wanted_again_in_one_step_is_kept() -> None:
    cache = make()
    hold(cache, "a", b"ant", 60)
    cache.release("a", b"ant")
    hold(cache, "b", b"bee", 60)
    assert b"ant" not in cache
    cache.release("b", b"bee")
    assert not hold(cache, "c", b"ant", 60), "the workers still have it"
    assert cache.report_evicted() == [b"bee"]
    cache.release_all("c")
    hold(cache, "d", b"bee", 60)
    assert cache.report_evicted() == [b"ant"]


def test_a_plan_is_not_good_after_a_change() -> None:
    cache = make()
    plan = cache.plan("a", b"ant", num_embeds=60, nbytes=0)
    hold(cache, "b", b"bee", 60)
    assert plan is not None
    with pytest.raises(InternalError, match="has changed"):
        cache.commit(plan)


def test_release_when_the_entry_is_already_gone() -> None:
    cache = make()
    for request in ("a", "b"):
        hold(cache, request, b"dog")
    assert cache.discard(b"dog") == {"a", "b"}
    cache.release("a", b"dog")
    cache.release_all("b")
    cache.release_all("b")
    assert cache.discard(b"dog") == frozenset()
    assert len(cache) == cache.used_embeds == cache.num_evictable == 0
    assert cache.report_evicted() == []


REQUESTS = st.sampled_from("abcd")
SIZES = {bytes([n]): rows for n, rows in enumerate((1, 3, 4, 4, 7, 9, 12))}
KEYS = st.sampled_from(sorted(SIZES))
CAPACITY_EMBEDS, CAPACITY_NBYTES = 20, 150


def nbytes_of(key: bytes) -> int:
    return ROW_NBYTES * SIZES[key] if key[0] % 2 else 0


class CacheMachine(RuleBasedStateMachine):
    """The model: keys in the order of their last release, and a list of uses."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make(CAPACITY_EMBEDS, CAPACITY_NBYTES)
        self.order: list[bytes] = []
        self.uses: list[tuple[str, bytes]] = []
        self.workers: set[bytes] = set()  # in the workers' caches
        self.encoding: set[bytes] = set()  # encoded in this step

    def is_held(self, key: bytes) -> bool:
        return any(used == key for _, used in self.uses)

    def let_go(self, key: bytes) -> None:
        if key in self.order and not self.is_held(key):
            self.order.remove(key)
            self.order.append(key)

    def fits(self, keys: list[bytes]) -> bool:
        rows, nbytes = sum(SIZES[k] for k in keys), sum(nbytes_of(k) for k in keys)
        return rows <= CAPACITY_EMBEDS and nbytes <= CAPACITY_NBYTES

    def victims_for(self, key: bytes) -> list[bytes] | None:
        if key in self.order:
            return []
        victims: list[bytes] = []
        free = [k for k in self.order if not self.is_held(k)]
        while not self.fits([k for k in self.order if k not in victims] + [key]):
            if not free:
                return None
            victims.append(free.pop(0))
        return victims

    @rule(request=REQUESTS, key=KEYS)
    def plan_and_commit(self, request: str, key: bytes) -> None:
        plan = self.cache.plan(request, key, num_embeds=SIZES[key], nbytes=nbytes_of(key))
        victims = self.victims_for(key)
        if victims is None:
            assert plan is None
            return
        assert plan is not None
        assert list(plan.victims) == victims
        with_workers = key in self.workers | self.encoding
        assert plan.needs_encode == (not with_workers)
        assert plan.takes_room == (not self.is_held(key))
        self.cache.commit(plan)
        if plan.needs_encode:
            self.encoding.add(key)
        self.order = [k for k in self.order if k not in victims]
        if key not in self.order:
            self.order.append(key)
        self.uses.append((request, key))

    @rule(request=REQUESTS, key=KEYS)
    def release(self, request: str, key: bytes) -> None:
        self.cache.release(request, key)
        if (request, key) in self.uses:
            self.uses.remove((request, key))
            self.let_go(key)

    @rule(request=REQUESTS)
    def release_all(self, request: str) -> None:
        held = list(self.cache.uses(request))  # in the order of their first use
        self.cache.release_all(request)
        self.uses = [use for use in self.uses if use[0] != request]
        for key in held:
            self.let_go(key)

    @rule(key=KEYS)
    def discard(self, key: bytes) -> None:
        owners = {request for request, used in self.uses if used == key}
        assert self.cache.discard(key) == owners
        self.uses = [use for use in self.uses if use[1] != key]
        self.order = [k for k in self.order if k != key]
        self.workers.discard(key)
        self.encoding.discard(key)

    @rule()
    def end_step(self) -> None:
        evicted = self.cache.report_evicted()
        assert len(set(evicted)) == len(evicted)
        self.workers |= self.encoding
        self.encoding = set()
        assert set(evicted) <= self.workers
        self.workers -= set(evicted)
        assert self.workers == set(self.order), "the workers hold what is cached, and no more"

    @invariant()
    def agrees(self) -> None:
        cached = self.order
        assert len(self.cache) == len(cached)
        assert self.fits(cached)
        assert self.cache.used_embeds == sum(SIZES[k] for k in cached)
        assert self.cache.used_nbytes == sum(nbytes_of(k) for k in cached)
        assert self.cache.num_evictable == sum(not self.is_held(k) for k in cached)
        for key in cached:
            owners = {request for request, used in self.uses if used == key}
            assert self.cache.owners(key) == owners
        for request in "abcd":
            own = [used for owner, used in self.uses if owner == request]
            assert self.cache.uses(request) == {key: own.count(key) for key in own}

    def teardown(self) -> None:
        for request in "abcd":
            self.cache.release_all(request)
        assert self.cache.num_evictable == len(self.cache)
        assert all(not self.cache.uses(request) for request in "abcd")


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = STATE_MACHINE
