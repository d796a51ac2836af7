"""Features of a step stay as they are until its end, even if the store daemon dies or stops."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
import psutil
import pytest

from afferent import keys
from afferent.engines import quarantine
from afferent.engines.vllm.plugin import step_pins
from afferent.engines.vllm.plugin.step import FeaturesLost, Located, Step
from afferent.engines.vllm.plugin.step_pins import StepPins
from afferent.engines.vllm.plugin.step_reader import StepReader
from afferent.errors import StoreFull
from afferent.store.block import codec
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.daemon.server import StoreServer
from afferent.store.protocol.items import MAX_ITEMS, Find
from afferent.store.state.region import DEFAULT_SHARES
from afferent.types import MiB, ObjectKind
from tests.server import wait_until
from tests.store.outcomes import handle_of

KEYS = [keys.digest(b"item %d" % number) for number in range(4)]
ABSENT = keys.digest(b"absent")


@pytest.fixture(scope="module")
def running() -> Iterator[StoreServer]:
    with StoreServer(8 * MiB, shares=DEFAULT_SHARES) as server:
        yield server


@pytest.fixture
def server(running: StoreServer) -> StoreServer:
    """An empty store; if the last test killed the daemon, a new one has begun."""
    with DaemonStore(running.address, name="empty", writable=True) as store:
        wait_until(lambda: store.stat().held_nbytes == 0)
        for kind in ObjectKind:
            store.evict(kind)
        assert store.stat().num_objects == 0
    return running


@pytest.fixture
def store(server: StoreServer) -> Iterator[DaemonStore]:
    with DaemonStore(server.address, name="frontend", writable=True) as store:
        yield store


@pytest.fixture
def pins(server: StoreServer) -> Iterator[StepPins]:
    pins = StepPins(lambda: DaemonStore(server.address, name="core"))
    yield pins
    pins.close()


def put(store: DaemonStore, wanted: Sequence[bytes] = KEYS) -> None:
    for number, key in enumerate(wanted):
        store.put("put", {"x": np.full(1000, number)}, key=key)
    store.forget("put")


def expect(pins: StepPins, wanted: Sequence[bytes]) -> None:
    wait_until(lambda: pins._is_open)
    pins.expect("r", wanted)


def held_nbytes(store: DaemonStore) -> int:
    return store.stat().kinds[ObjectKind.FEATURES].held_nbytes


def secure(pins: StepPins, request: str, wanted: Sequence[bytes]) -> bool:
    """Schedule steps until the request is ready or lost; return whether it is ready."""
    for _ in range(2000):
        if pins.secure(request, wanted):
            return True
        if request in pins.take_lost():
            return False
        pins.end_step()
        time.sleep(0.002)  # a step of other requests
    raise AssertionError("it is deferred for ever")


def value(reader: StepReader, step: Step, key: bytes) -> int:
    tree = codec.view(reader.block(step, key))
    found = set(np.array(tree["x"]).tolist())  # type: ignore[call-overload,index]
    reader.check_core()
    (only,) = found
    return int(only)


def overwrite(store: DaemonStore) -> None:
    """Delete all features, and fill the arena with others."""
    store.delete(KEYS)
    try:
        while True:
            store.put("others", {"x": np.full(100_000, -1)})
    except StoreFull:
        store.forget("others")


def test_end_step_contains_used_items_only(store: DaemonStore, pins: StepPins) -> None:
    put(store)
    assert secure(pins, "r", KEYS[:3])
    for key in (KEYS[0], KEYS[2]):
        pins.use(key)
    pinned = pins.end_step()
    assert pinned.step.core == os.getpid()
    assert pinned.step.items.keys() == {KEYS[0], KEYS[2]}
    reader = StepReader(store)
    reader.follow(pinned.step)
    assert [value(reader, pinned.step, key) for key in pinned.step.items] == [0, 2]
    with pytest.raises(FeaturesLost, match="not pinned"):
        reader.block(pinned.step, KEYS[1])


def test_end_step_keeps_unused_pins_for_next_step(
    store: DaemonStore, pins: StepPins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_pins, "_KEPT_S", 300.0)  # on a slow machine, too
    put(store)
    assert secure(pins, "r", KEYS)
    pins.end_step()
    overwrite(store)  # a new question to the store would find nothing
    assert pins.secure("r", KEYS)
    for key in KEYS:
        pins.use(key)
    assert len(pins.end_step().step.items) == 4


def test_secure_absent_key_loses_that_request_alone(store: DaemonStore, pins: StepPins) -> None:
    put(store)
    assert not secure(pins, "lost", [KEYS[0], ABSENT])
    assert secure(pins, "ready", [KEYS[0]])
    assert pins.take_lost() == set()


def test_secure_quarantined_item_loses_request(
    store: DaemonStore, pins: StepPins, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store)
    quarantine.put(store, KEYS[0], engine="a", is_certain=True)
    quarantine.put(store, KEYS[1], engine="a", is_certain=False)
    assert not secure(pins, "bad", KEYS[:2])
    assert secure(pins, "good", KEYS[1:2])
    monkeypatch.setattr(quarantine, "_LENGTH_S", 0.0)
    quarantine.put(store, KEYS[0], engine="a", is_certain=True)  # replaces the record
    assert secure(pins, "later", KEYS[:2])
    for key in KEYS[:2]:
        pins.use(key)
    pins.end_step()
    monkeypatch.undo()
    for _rank in range(2):  # the first record has expired
        quarantine.put(store, KEYS[1], engine="a", is_certain=False)
    assert secure(pins, "one failure of two ranks", KEYS[1:2])
    pins.use(KEYS[1])
    pins.end_step()
    for _rank in range(2):
        quarantine.put(store, KEYS[1], engine="b", is_certain=False)
    assert not secure(pins, "second failure", KEYS[1:2])


def test_quarantine_does_not_read_records_of_version_before(
    store: DaemonStore, pins: StepPins
) -> None:
    put(store)
    older = keys.frame(b"afferent/quarantine/v1", KEYS[0])
    record = {"until_s": time.time() + 60, "holds": False}  # without the engine's name
    store.put("older", record, kind=ObjectKind.RECORDS, key=older)
    quarantine.put(store, KEYS[0], engine="a", is_certain=False)
    assert secure(pins, "one failure", KEYS[:1])
    pins.use(KEYS[0])
    pins.end_step()
    quarantine.put(store, KEYS[0], engine="b", is_certain=False)
    assert not secure(pins, "second failure", KEYS[:1])


def test_pinned_step_survives_deletion_and_refill(store: DaemonStore, pins: StepPins) -> None:
    put(store)
    assert secure(pins, "r", KEYS)
    for key in KEYS:
        pins.use(key)
    pinned = pins.end_step()
    overwrite(store)
    reader = StepReader(store)
    reader.follow(pinned.step)
    assert [value(reader, pinned.step, key) for key in KEYS] == [0, 1, 2, 3]
    del pinned
    wait_until(lambda: store.stat().kinds[ObjectKind.FEATURES].held_nbytes == 0)


def test_pinned_step_delays_new_daemon(
    server: StoreServer, store: DaemonStore, pins: StepPins
) -> None:
    put(store)
    reader = StepReader(store)
    assert secure(pins, "r", KEYS)
    for key in KEYS:
        pins.use(key)
    pinned = pins.end_step()
    before = server.pid
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: not store.is_open)
    reader.follow(pinned.step)
    assert [value(reader, pinned.step, key) for key in KEYS] == [0, 1, 2, 3]
    assert not store.is_open
    assert not pins.secure("next", KEYS)
    del pinned
    wait_until(lambda: store.is_open)
    assert not secure(pins, "next", KEYS), "the new daemon has none of them"


def test_secure_without_daemon_defers_then_loses_request(
    server: StoreServer, store: DaemonStore, pins: StepPins, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store)
    assert secure(pins, "r", KEYS[:1])
    pins.use(KEYS[0])
    pinned = pins.end_step()  # so that no new daemon begins
    before = server.pid
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: not store.is_open)
    assert not pins.secure("late", KEYS[1:2])
    monkeypatch.setattr(step_pins, "_PATIENCE_S", 0.0)
    wait_until(lambda: not pins.secure("late", KEYS[1:2]) and "late" in pins.take_lost())
    del pinned


def test_secure_silent_daemon_defers_request(
    server: StoreServer, store: DaemonStore, pins: StepPins, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store)
    assert secure(pins, "first", KEYS[:1])
    pins.end_step()
    monkeypatch.setattr(step_pins, "_PATIENCE_S", 0.0)
    daemon = psutil.Process(server.pid)
    daemon.suspend()
    try:
        for _ in range(5):  # each returns while the daemon is stopped
            assert not pins.secure("r", KEYS[1:])
            assert pins.secure("text", [])
            assert pins.take_lost() == set()
            pins.end_step()
    finally:
        daemon.resume()
    assert secure(pins, "r", KEYS[1:])


@pytest.mark.parametrize(
    ("step_s", "wait_s"), [(0.0, 1e-3), (0.02, 1e-3), (0.1, 5e-3), (0.2, 1e-2), (300.0, 1e-2)]
)
def test_wait_grows_with_the_step(step_s: float, wait_s: float) -> None:
    assert step_pins.longest_wait_s(step_s) == pytest.approx(wait_s)


def test_found_pins_unused_for_a_second_are_released(
    store: DaemonStore, pins: StepPins, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store)
    monkeypatch.setattr(step_pins, "longest_wait_s", lambda _: 0.0)
    pins.end_step()
    assert pins._left_s == 0
    assert not pins.secure("aborted", KEYS)
    wait_until(lambda: held_nbytes(store) > 0)
    wait_until(lambda: held_nbytes(store) == 0)


def test_expected_features_are_pinned_before_a_step_asks(
    server: StoreServer, store: DaemonStore, pins: StepPins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_pins, "_KEPT_S", 0.01)  # they are kept for longer than others
    put(store)
    expect(pins, [*KEYS, KEYS[0]])
    wait_until(lambda: pins._found.keys() == set(KEYS))
    daemon = psutil.Process(server.pid)
    daemon.suspend()
    try:
        assert pins.secure("r", KEYS)
    finally:
        daemon.resume()
    for key in KEYS:
        pins.use(key)
    assert pins.end_step().step.items.keys() == set(KEYS)


@pytest.mark.parametrize("how", ["time", "end", "report", "daemon"])
def test_expected_features_are_released_if_no_request_looks(
    how: str,
    server: StoreServer,
    store: DaemonStore,
    pins: StepPins,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the end of their request, or of their daemon; by time only if there is no end."""
    if how == "time":
        monkeypatch.setattr(step_pins, "_EXPECTED_S", 0.5)
    put(store)
    expect(pins, KEYS)
    wait_until(lambda: pins._found.keys() == set(KEYS))
    assert held_nbytes(store) > 0
    match how:
        case "end":
            pins.forget("r")
        case "report":
            pins.report_encoded("r", KEYS)
        case "daemon":
            psutil.Process(server.pid).kill()
    wait_until(lambda: not pins._found)
    if how != "daemon":
        wait_until(lambda: held_nbytes(store) == 0)


def test_what_another_request_expects_is_kept(store: DaemonStore, pins: StepPins) -> None:
    """One request with an item is scheduled, and ends, while another one waits."""
    put(store)
    expect(pins, KEYS[:2])
    pins.expect("other", KEYS[:1])
    wait_until(lambda: pins._found.keys() == set(KEYS[:2]))
    assert pins.secure("r", KEYS[:2])
    for key in KEYS[:2]:
        pins.use(key)
    pins.end_step()
    pins.report_encoded("r", KEYS[:2])
    assert pins._found.keys() == {KEYS[0]}
    pins.forget("r")
    assert pins.secure("other", KEYS[:1])
    pins.end_step()
    pins.forget("other")
    assert not pins._found
    assert not pins._expecting
    assert not pins._expected_of


def test_many_expected_keys_are_asked_for_in_several_questions(
    store: DaemonStore, pins: StepPins
) -> None:
    put(store)
    others = [keys.digest(b"other %d" % number) for number in range(MAX_ITEMS)]
    expect(pins, [*others, *KEYS])
    wait_until(lambda: pins._found.keys() == set(KEYS))
    assert pins._absent.keys() >= set(others)


def test_nothing_is_expected_of_a_store_that_is_not_there() -> None:
    def never() -> DaemonStore:
        raise StoreFull("not now")

    pins = StepPins(never)
    pins.expect("r", KEYS)
    assert not pins._wanted
    pins.close()


def test_absence_of_expected_features_loses_no_request(store: DaemonStore, pins: StepPins) -> None:
    expect(pins, KEYS)
    wait_until(lambda: pins._absent.keys() >= set(KEYS))
    put(store)
    assert secure(pins, "r", KEYS)


def test_use_unsecured_item_pins_it_or_raises(
    store: DaemonStore, pins: StepPins, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store)
    pins.use(KEYS[3])
    assert pins.end_step().step.items.keys() == {KEYS[3]}
    monkeypatch.setattr(step_pins, "_PATIENCE_S", 0.1)
    with pytest.raises(FeaturesLost):
        pins.use(ABSENT)


def test_check_core_dead_core_raises(server: StoreServer, store: DaemonStore) -> None:
    (handle,) = [store.put("put", {"x": np.full(1000, 7)}, key=KEYS[0])]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as core:
        where = Located(store.arena.identity, handle)
        step = Step(core.pid, {KEYS[0]: where})
        reader = StepReader(store)
        reader.follow(step)
        assert value(reader, step, KEYS[0]) == 7
        core.kill()
    with pytest.raises(FeaturesLost, match="core"):
        value(reader, step, KEYS[0])
    again = StepReader(store)
    again.follow(step)
    with pytest.raises(FeaturesLost, match="core"):
        again.check_core()


def test_reader_keeps_map_of_former_arena(store: DaemonStore, pins: StepPins) -> None:
    """A whole server may have been replaced while a step runs."""
    put(store)
    assert secure(pins, "r", KEYS)
    pins.use(KEYS[1])
    pinned = pins.end_step()
    with (
        StoreServer(MiB) as other,
        DaemonStore(other.address, name="worker", writable=True) as there,
    ):
        reader = StepReader(there)
        reader._map = store.arena
        reader.follow(pinned.step)
        assert value(reader, pinned.step, KEYS[1]) == 1
        where = Located(there.arena.identity, there.put("put", {"x": np.full(1000, 5)}))
        assert value(reader, Step(os.getpid(), {KEYS[0]: where}), KEYS[0]) == 5
        assert reader._map is there.arena


def test_secure_absence_asked_before_the_request_does_not_count(
    store: DaemonStore, pins: StepPins
) -> None:
    assert not secure(pins, "before", KEYS[:1])
    put(store)
    assert secure(pins, "after", KEYS[:1])


def test_thread_survives_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log's record of the error may hold features, so the daemon is the test's own."""
    broken = iter((True, False))
    is_active = quarantine.is_active

    def fails_once(record: memoryview) -> bool:
        if next(broken, False):
            raise RuntimeError("broken for a test")
        return is_active(record)

    monkeypatch.setattr(quarantine, "is_active", fails_once)
    with (
        StoreServer(8 * MiB, shares=DEFAULT_SHARES) as server,
        DaemonStore(server.address, name="frontend", writable=True) as store,
        contextlib.closing(StepPins(lambda: DaemonStore(server.address, name="core"))) as pins,
    ):
        put(store)
        quarantine.put(store, KEYS[0], engine="a", is_certain=False)
        assert secure(pins, "r", KEYS[:1])


def test_report_encoded_ends_the_pins_of_requests_that_allow_it(
    store: DaemonStore, pins: StepPins
) -> None:
    put(store)
    handles = [handle_of(each) for each in store.acquire("r", [Find(key) for key in KEYS])]
    store.release_early("r", handles)
    pins.report_encoded("r", [*(bytes(32) for _ in range(5000)), *KEYS])
    wait_until(lambda: store.stat().held_nbytes == 0)
    assert store.check_pins("r", handles)
    store.release("r")
    assert not store.check_pins("r", handles)


def test_view_outlives_its_request_when_the_object_was_deleted(
    server: StoreServer, store: DaemonStore
) -> None:
    put(store)
    with DaemonStore(server.address, name="core") as core:
        (outcome,) = core.acquire("lease", [Find(KEYS[1])])
        view = core.bytes_for("lease", handle_of(outcome))
        overwrite(store)
        core.forget("lease")  # pins the view, whose object is deleted
        core.stat()
        overwrite(store)
        assert set(np.array(codec.view(view)["x"]).tolist()) == {1}  # type: ignore[call-overload]
        del view
        wait_until(lambda: store.stat().kinds[ObjectKind.FEATURES].held_nbytes == 0)
