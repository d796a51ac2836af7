"""Placement of requests on servers: pure logic, with generated loads, failures and times."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, OrderedDict, deque

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from afferent.engines.http_upstream.conversation import conversation_of
from afferent.engines.http_upstream.placement import (
    Placement,
    Prefixes,
    Replica,
    RetryBudget,
    blocks_of,
)

KEYS = [bytes([number]) * 32 for number in range(200)]


def placement(number: int, *, now_s: float = 0.0) -> Placement:
    """Return servers that are ready together, so that none returns slowly."""
    made = Placement()
    for index in range(number):
        made.add(f"http://{index}")
    for each in made.replicas:
        made.set_ready(each, is_ready=True, now_s=now_s)
    return made


def chosen(of: Placement, key: bytes, **more: object) -> Replica:
    choice = of.choose(key, now_s=100.0, **more)  # type: ignore[arg-type]
    assert choice is not None
    return choice.replica


def test_key_goes_to_same_server_and_all_servers_get_keys() -> None:
    servers = placement(4)
    counts = Counter(chosen(servers, key).name for key in KEYS)
    assert len(counts) == 4
    assert min(counts.values()) > len(KEYS) / 4 / 2, counts
    again = placement(4)
    assert [chosen(servers, key).name for key in KEYS] == [chosen(again, key).name for key in KEYS]


def test_server_that_leaves_moves_only_its_own_keys() -> None:
    servers = placement(5)
    before = {key: chosen(servers, key).name for key in KEYS}
    gone = next(each for each in servers.replicas if each.name == before[KEYS[0]])
    servers.remove(gone)
    moved = [key for key in KEYS if chosen(servers, key).name != before[key]]
    assert moved == [key for key in KEYS if before[key] == gone.name]


@settings(max_examples=200)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.sampled_from(KEYS))
def test_no_server_gets_more_than_its_bounded_share(loads: list[int], key: bytes) -> None:
    servers = placement(len(loads))
    for each, load in zip(servers.replicas, loads, strict=True):
        each.num_running = load
    choice = servers.choose(key, now_s=100.0)
    assert choice is not None
    share = max(8, math.ceil(1.5 * (sum(loads) + 1) / len(loads)))
    assert choice.replica.num_running < share
    if max(loads) < share:
        assert choice.how == "first"


@settings(max_examples=100)
@given(st.integers(1, 10), st.lists(st.sampled_from(KEYS[:20]), max_size=200))
def test_requests_that_never_end_are_spread_evenly(number: int, keys: list[bytes]) -> None:
    servers = placement(number)
    for key in keys:
        chosen(servers, key).num_running += 1
    most = max(each.num_running for each in servers.replicas)
    assert most <= max(8, math.ceil(1.5 * len(keys) / number) + 1)


def test_request_without_key_goes_to_least_loaded() -> None:
    servers = placement(3)
    for each, load in zip(servers.replicas, (3, 1, 2), strict=True):
        each.num_running = load
    choice = servers.choose(b"", now_s=100.0)
    assert choice is not None
    assert (choice.replica.name, choice.how) == ("http://1", "least_loaded")


def test_no_ready_server_gives_none() -> None:
    servers = placement(2)
    tried = list(servers.replicas)
    assert servers.choose(KEYS[0], now_s=0.0, excluded=tried) is None
    for each in tried:
        servers.set_ready(each, is_ready=False, now_s=0.0)
    assert servers.choose(KEYS[0], now_s=0.0) is None


def test_preferred_server_comes_first_unless_it_is_loaded() -> None:
    servers = placement(4)
    assert {chosen(servers, key, preferred=["http://2"]).name for key in KEYS} == {"http://2"}
    next(each for each in servers.replicas if each.name == "http://2").num_running = 8
    assert {chosen(servers, key, preferred=["http://2"]).name for key in KEYS[:9]} != {"http://2"}


def test_of_several_servers_that_have_an_item_the_first_in_the_order_of_its_key_is_chosen() -> None:
    servers, known = placement(4), ["http://1", "http://2"]
    found = {key: chosen(servers, key, preferred=known).name for key in KEYS}
    assert set(found.values()) == set(known)
    for key in KEYS:
        usual = chosen(servers, key).name
        assert found[key] == usual or usual not in known
    busy = next(each for each in servers.replicas if each.name == "http://1")
    busy.num_running = 8
    assert {chosen(servers, key, preferred=known).name for key in KEYS} == {"http://2"}


def test_a_choice_says_whether_the_server_is_known_to_have_the_item() -> None:
    servers = placement(3)
    for key in KEYS:
        choices = [
            servers.choose(key, now_s=100.0, preferred=names) for names in ((), ["http://2"])
        ]
        assert [choice and choice.how for choice in choices] == ["first", "known"]


def test_failing_server_is_ejected_and_returns_slowly() -> None:
    servers = placement(3)
    bad, good, _ = servers.replicas
    assert not servers.note(bad, has_failed=True, now_s=0.0)
    assert not servers.note(bad, has_failed=True, now_s=0.1)
    assert servers.note(bad, has_failed=True, now_s=0.2)
    assert bad.weight(1.0) == 0
    assert bad.weight(5.3) == 0.1
    assert 0.4 < bad.weight(5.2 + 15.0) < 0.6
    assert bad.weight(5.2 + 30.0) == good.weight(5.2 + 30.0) == 1.0


def test_ejected_server_is_chosen_if_no_other_is_ready() -> None:
    servers = placement(2)
    bad, other = servers.replicas
    for _ in range(3):
        servers.note(bad, has_failed=True, now_s=100.0)
    assert {chosen(servers, key).name for key in KEYS[:9]} == {other.name}
    servers.set_ready(other, is_ready=False, now_s=100.0)
    assert chosen(servers, KEYS[0]) is bad
    assert servers.choose(KEYS[0], now_s=100.0, excluded=[bad]) is None


def test_second_ejection_lasts_longer() -> None:
    servers = placement(3)
    bad = next(iter(servers.replicas))
    for start_s, spell_s in ((0.0, 5.0), (10.0, 10.0), (25.0, 20.0)):
        assert [servers.note(bad, has_failed=True, now_s=start_s) for _ in range(3)][-1]
        assert bad.ejected_until_s == start_s + spell_s


def test_rare_failures_eject_no_server() -> None:
    servers = placement(3)
    for number in range(300):
        has_failed = number % 3 == 0
        for each in servers.replicas:
            assert not servers.note(each, has_failed=has_failed, now_s=number / 10)


@settings(max_examples=200)
@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 8), st.booleans(), st.floats(0, 3)), max_size=120),
)
def test_at_most_half_are_ejected_at_a_time(
    number: int, events: list[tuple[int, bool, float]]
) -> None:
    servers, now_s = placement(number), 0.0
    every = list(servers.replicas)
    for index, has_failed, later_s in events:
        now_s += later_s
        servers.note(every[index % number], has_failed=has_failed, now_s=now_s)
        in_use = sum(each.weight(now_s) > 0 for each in every)
        assert in_use >= math.ceil(number / 2)
        assert all(each.num_failed <= each.num_ended for each in every)


def test_server_that_returns_beside_others_gets_few_requests_at_first() -> None:
    servers = placement(3)
    late = next(iter(servers.replicas))
    servers.set_ready(late, is_ready=False, now_s=50.0)
    servers.set_ready(late, is_ready=True, now_s=99.0)
    mine = [key for key in KEYS if chosen(placement(3), key).name == late.name]
    for key in mine:
        chosen(servers, key).num_running += 1
    others = [each.num_running for each in servers.replicas if each is not late]
    assert 1 <= late.num_running < min(others) / 2


def test_all_servers_of_a_start_are_in_full_use_at_once() -> None:
    servers = placement(3, now_s=100.0)
    assert [each.weight(100.0) for each in servers.replicas] == [1.0, 1.0, 1.0]
    late = servers.add("late", is_late=True)
    servers.set_ready(late, is_ready=True, now_s=100.0)
    assert late.weight(100.0) == 0.1


@given(st.lists(st.booleans(), max_size=400))
def test_retries_are_at_most_a_fifth_of_the_requests_and_a_few(wishes: list[bool]) -> None:
    budget, num_retries = RetryBudget(), 0
    for number, wants in enumerate(wishes, 1):
        budget.earn()
        if wants and budget.has_any:
            budget.spend()
            num_retries += 1
        assert num_retries <= 20 + number / 5
        assert 0 <= budget.left <= 20


# A trace


EVENT_DELAY_S = 0.1
"""Time until a gateway has got an event: usually a tenth of it."""


class Cache:
    """Cache of one server: the items that were used last."""

    def __init__(self) -> None:
        self.items: OrderedDict[int, None] = OrderedDict()

    def use(self, item: int) -> bool:
        """Return whether it has an item, which it has from now on."""
        is_hit = item in self.items
        self.items[item] = None
        self.items.move_to_end(item)
        if len(self.items) > 60:
            self.items.popitem(last=False)
        return is_hit


def hits(policy: str, *, rate: float, seed: int, num_requests: int = 6000) -> int:
    """Return the hits of Zipf-distributed items on eight servers, one of which restarts at times.

    A miss takes twice as long as a hit.
    """
    rng = random.Random(seed)
    items = rng.choices(
        range(2000), [1 / (rank + 1) ** 1.1 for rank in range(2000)], k=num_requests
    )
    servers, caches = placement(8), [Cache() for _ in range(8)]
    every = list(servers.replicas)
    now_s, num_hits, ends = 100.0, 0, list[tuple[float, int]]()
    known, told = deque[tuple[float, list[frozenset[int]]]](), [frozenset[int]()] * 8
    for number, item in enumerate(items):
        now_s += rng.expovariate(rate)
        while ends and ends[0][0] <= now_s:
            every[heapq.heappop(ends)[1]].num_running -= 1
        if number % 1500 == 1499:
            caches[rng.randrange(8)] = Cache()
        if policy in ("placement", "events"):
            while known and known[0][0] <= now_s - EVENT_DELAY_S:  # as the events tell by now
                _, told = known.popleft()
            having = [each.name for each, has in zip(every, told, strict=True) if item in has]
            choice = servers.choose(
                item.to_bytes(32, "little"),
                now_s=now_s,
                preferred=having if policy == "events" else (),
            )
            assert choice is not None
            index = every.index(choice.replica)
        elif policy == "oracle":
            having = [index for index in range(8) if item in caches[index].items]
            index = min(having or range(8), key=lambda index: every[index].num_running)
        else:
            index = number % 8
        is_hit = caches[index].use(item)
        known.append((now_s, [frozenset(each.items) for each in caches]))
        num_hits += is_hit
        every[index].num_running += 1
        heapq.heappush(ends, (now_s + (1 if is_hit else 2) * rng.uniform(0.5, 1.5), index))
    return num_hits


@pytest.mark.parametrize("rate", [4.0, 16.0, 64.0])
def test_repeats_hit_nearly_as_often_as_by_an_oracle(rate: float) -> None:
    by_placement = hits("placement", rate=rate, seed=1)
    assert by_placement > 0.95 * hits("oracle", rate=rate, seed=1)
    assert by_placement > 1.3 * hits("round robin", rate=rate, seed=1)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("rate", [4.0, 16.0, 64.0])
def test_with_item_events_repeats_hit_nearly_as_often_as_by_an_oracle(
    rate: float, seed: int
) -> None:
    by_events = hits("events", rate=rate, seed=seed)
    print(by_events, hits("placement", rate=rate, seed=seed), hits("oracle", rate=rate, seed=seed))
    assert by_events > 0.975 * hits("oracle", rate=rate, seed=seed)


# Texts


def chat(*messages: tuple[str, str]) -> bytes:
    text = ",".join(f'{{"role":"{role}","content":"{content}"}}' for role, content in messages)
    return f'{{"model":"m","messages":[{text}],"stream":true}}'.encode()


def test_turns_of_a_conversation_have_one_key() -> None:
    system, first = ("system", "be brief"), ("user", "hello")
    key, _ = conversation_of(chat(system, first))
    assert key == conversation_of(chat(system, first, ("assistant", "hi"), ("user", "more")))[0]
    assert key != conversation_of(chat(system, ("user", "other")))[0]
    assert key != conversation_of(chat(("system", "be long"), first))[0]


def test_texts_without_messages_have_keys_and_no_text_has_none() -> None:
    one, _ = conversation_of(b'{"prompt": "a"}')
    assert len(one) == 32
    assert one != conversation_of(b'{"prompt": "b"}')[0]
    for body in (b"{}", b"", b"[]", b'{"messages": ', b"\xff", b'{"model": "m"}'):
        assert conversation_of(body) == (b"", b""), body
    assert conversation_of(b'{"messages": "text"}')[0], "the engine refuses it, not the placement"


def test_longest_known_prefix_is_found_if_it_is_half_of_the_text() -> None:
    prefixes, text = Prefixes(), b"a" * 4096
    prefixes.note(blocks_of(text), "one")
    assert prefixes.find(blocks_of(text)) == "one"
    assert prefixes.find(blocks_of(text + b"b" * 4000)) == "one"
    assert prefixes.find(blocks_of(text + b"b" * 6000)) == ""
    assert prefixes.find(blocks_of(b"c" + text)) == ""
    assert prefixes.find([]) == ""
    prefixes.note(blocks_of(text + b"b" * 4096), "two")
    assert prefixes.find(blocks_of(text + b"b" * 4096 + b"c" * 512)) == "two"


@given(st.binary(max_size=3000), st.binary(max_size=3000))
def test_blocks_agree_exactly_on_common_prefixes(one: bytes, other: bytes) -> None:
    pairs = zip(blocks_of(one), blocks_of(other), strict=False)
    same = [a == b for a, b in pairs]
    common = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 3000)
    assert same == [(index + 1) * 512 <= common for index in range(len(same))]


def test_old_prefixes_are_forgotten() -> None:
    prefixes = Prefixes(max_blocks=8)
    for number in range(20):
        prefixes.note(blocks_of(bytes([number]) * 1024), "one")
    assert prefixes.find(blocks_of(bytes([19]) * 1024)) == "one"
    assert prefixes.find(blocks_of(bytes([1]) * 1024)) == ""
