"""Requests that make missing objects themselves, and requests that wait for these objects."""

from __future__ import annotations

import pytest

from afferent.store.protocol import requests
from afferent.store.protocol.results import InFlight, Owner
from tests.store.outcomes import states
from tests.store.pure_store import BAD, FRONTEND, KEY, KEY_2, OTHER, SECOND, Store, code


def test_one_makes_and_the_others_wait() -> None:
    store = Store()
    (mine,) = store.claim(FRONTEND, "r")
    assert isinstance(mine, Owner)
    assert states(store.claim(OTHER, "r")) == ["in_flight"]
    assert isinstance(store.acquire(OTHER, "job"), InFlight)
    waits = [store.wait(OTHER, "r"), store.wait(OTHER, "job")]
    store.seal(FRONTEND, "r", mine.handle)
    for wait in waits:
        assert store.outcome(OTHER, wait).handle == mine.handle
    (item,) = (item for item in store.state.objects if item.key == KEY)
    assert set(item.pins) == {(FRONTEND, "r"), (OTHER, "r"), (OTHER, "job")}


def test_many_are_claimed_in_one_call() -> None:
    store = Store()
    keys = [bytes([n]) * 32 for n in range(100)]
    first = store.claim(FRONTEND, "r", *keys[:40])
    assert states(first) == ["owner"] * 40
    store.seal(FRONTEND, "r", *(outcome.handle for outcome in first[:20]))
    again = store.claim(OTHER, "r", *keys)
    assert states(again) == ["hit"] * 20 + ["in_flight"] * 20 + ["owner"] * 60
    offsets = [outcome.handle.offset for outcome in again[40:] if isinstance(outcome, Owner)]
    assert offsets == list(range(offsets[0], offsets[0] + 60 * 1024, 1024))
    statistics = store.state.statistics()
    assert (statistics.num_hits, statistics.num_joined, statistics.num_misses) == (20, 20, 100)


def test_as_many_are_claimed_as_there_is_room_for() -> None:
    store = Store(capacity_nbytes=8192)
    keys = [bytes([n]) * 32 for n in range(6)]
    outcomes = store.claim(FRONTEND, "r", *keys)
    assert states(outcomes) == ["owner"] * 4 + ["failed"] * 2
    assert code(outcomes[5]) == "store_full"
    assert isinstance(store.claim(OTHER, "r", keys[0], nbytes=5000)[0], InFlight)
    assert code(store.claim(FRONTEND, "r", KEY, nbytes=5000)[0]) == "arena_too_small"


def test_a_key_named_twice_is_claimed_once() -> None:
    store = Store()
    first, second = store.claim(FRONTEND, "r", KEY, KEY)
    assert states([first, second]) == ["owner"] * 2
    assert first.handle == second.handle
    assert store.claim(FRONTEND, "r", KEY) == [first], "nor does it wait for itself"
    assert store.state.statistics().num_objects == 1
    handle = store.claim(OTHER, "r", KEY_2, KEY)[0].handle
    wait = store.wait(OTHER, "r", KEY)
    store.seal(OTHER, "r", handle)
    assert store.answer(OTHER, wait) is None


@pytest.mark.parametrize("how", ["abort", "release", "disconnect", "die"])
def test_the_next_who_waits_makes_it_when_the_maker_gives_up(how: str) -> None:
    store = Store()
    (mine,) = store.claim(FRONTEND, "r")
    asked = [(OTHER, "r"), (OTHER, "s"), (SECOND, "r")]
    for client, request in asked:
        assert states(store.claim(client, request)) == ["in_flight"]
    waits = [store.wait(client, request) for client, request in asked]
    match how:
        case "abort":
            store.call(FRONTEND, requests.Abort, "r", [mine.handle])
        case "release":
            store.release(FRONTEND, "r")
        case "disconnect":
            store.disconnect(FRONTEND)
        case "die":
            store.die(FRONTEND)
    yours = store.outcome(OTHER, waits[0])
    assert isinstance(yours, Owner)
    assert yours.handle is not None
    # A disconnected client may still write: no other client gets its block.
    assert (yours.handle.offset != mine.handle.offset) == (how == "disconnect")  # type: ignore[union-attr]
    assert store.answer(OTHER, waits[1]) is store.answer(SECOND, waits[2]) is None
    store.seal(OTHER, "r", yours.handle)
    for client, wait in ((OTHER, waits[1]), (SECOND, waits[2])):
        assert store.outcome(client, wait).handle == yours.handle


def test_keys_are_handed_on_in_the_order_in_which_they_were_claimed() -> None:
    store = Store()
    keys = [bytes([n]) * 32 for n in range(5)]
    store.claim(FRONTEND, "r", *keys)
    store.claim(OTHER, "r", *keys)
    waits = [store.wait(OTHER, "r", key) for key in keys]
    store.die(FRONTEND)
    assert [reply.seq for reply in store.inbox[OTHER][-5:]] == waits


def test_a_wait_is_answered_early_when_something_is_to_be_done() -> None:
    store = Store()
    (first,) = store.claim(FRONTEND, "r", KEY)
    (second,) = store.claim(SECOND, "r", KEY_2)
    third = bytes(32)
    store.claim(SECOND, "r", third)
    store.claim(OTHER, "r", KEY, KEY_2, third)
    wait = store.wait(OTHER, "r", KEY, KEY_2, third)
    store.seal(SECOND, "r", second.handle)
    store.call(FRONTEND, requests.Abort, "r", [first.handle])
    assert states(store.outcomes(OTHER, wait)) == ["owner", "made", "in_flight"]
    assert store.failure(OTHER, store.wait(OTHER, "r", KEY)) == "not_permitted"
    wait = store.wait(OTHER, "r", third)
    store.die(SECOND)
    assert isinstance(store.outcome(OTHER, wait), Owner)


def test_who_became_the_maker_before_it_waits_is_told_when_it_does() -> None:
    store = Store()
    for ask in (
        lambda: store.outcome(OTHER, store.wait(OTHER, "r")),
        lambda: store.claim(OTHER, "r")[0],
    ):
        (mine,) = store.claim(FRONTEND, "r")
        store.claim(OTHER, "r")
        store.call(FRONTEND, requests.Abort, "r", [mine.handle])
        yours = ask()
        assert isinstance(yours, Owner)
        store.call(OTHER, requests.Abort, "r", [yours.handle])
        assert store.state.statistics().num_objects == 0


def test_who_became_the_maker_is_told_at_once_though_others_still_make_the_rest() -> None:
    store = Store()
    (mine, _) = store.claim(FRONTEND, "r", KEY, KEY_2)
    store.claim(OTHER, "r", KEY, KEY_2)
    store.call(FRONTEND, requests.Abort, "r", [mine.handle])
    wait = store.wait(OTHER, "r", KEY_2, KEY)
    assert states(store.outcomes(OTHER, wait)) == ["in_flight", "owner"]


def test_who_becomes_the_maker_and_goes_hands_it_on() -> None:
    store = Store()
    store.claim(FRONTEND, "r")
    for client in (OTHER, SECOND):
        store.claim(client, "r")
    wait = store.wait(SECOND, "r")
    store.release(FRONTEND, "r")
    store.release(OTHER, "r")  # it had become the owner, and had not been notified
    assert isinstance(store.outcome(SECOND, wait), Owner)


def test_an_abort_with_a_failure_fails_all_who_wait() -> None:
    store = Store()
    mine, other = store.claim(FRONTEND, "r", KEY, KEY_2)
    store.claim(OTHER, "r", KEY, KEY_2)
    wait = store.wait(OTHER, "r", KEY)
    store.call(FRONTEND, requests.Abort, "r", [mine.handle], BAD)
    assert store.outcome(OTHER, wait).failure == BAD
    assert store.state.statistics().num_objects == 1
    assert states(store.claim(SECOND, "r", KEY)) == ["owner"]
    assert store.refusal(OTHER, requests.Abort, "r", [other.handle]) == "not_permitted"


def test_who_can_not_make_it_fails_when_the_maker_goes() -> None:
    store = Store()
    store.claim(FRONTEND, "r")
    store.acquire(OTHER, "r")
    wait = store.wait(OTHER, "r")
    store.die(FRONTEND)
    assert code(store.outcome(OTHER, wait)) == "worker_died"


def test_who_has_no_room_to_make_it_is_passed_over() -> None:
    store = Store(capacity_nbytes=4096)
    store.claim(FRONTEND, "r", nbytes=1024)
    store.claim(OTHER, "r", nbytes=4096)
    store.claim(SECOND, "r", nbytes=1024)
    waits = (OTHER, store.wait(OTHER, "r")), (SECOND, store.wait(SECOND, "r"))
    store.die(FRONTEND)
    assert code(store.outcome(*waits[0])) == "arena_too_small"
    assert isinstance(store.outcome(*waits[1]), Owner)


def test_a_key_that_killed_two_who_made_it_themselves_is_refused() -> None:
    store = Store()
    store.claim(FRONTEND, "r")
    for client in (OTHER, SECOND):
        store.claim(client, "r")
    wait = store.wait(SECOND, "r")
    store.die(FRONTEND)
    assert store.answer(SECOND, wait) is None
    store.die(OTHER)
    assert code(store.outcome(SECOND, wait)) == "quarantined"
    assert code(store.claim(SECOND, "r")[0]) == "quarantined"


def test_giving_up_is_no_crashes() -> None:
    store = Store()
    for _ in range(3):
        (mine,) = store.claim(FRONTEND, "r")
        store.call(FRONTEND, requests.Abort, "r", [mine.handle])
    assert states(store.claim(FRONTEND, "r")) == ["owner"]
