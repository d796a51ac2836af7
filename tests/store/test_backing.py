"""Memory of an arena: allocated in chunks as it is used, never twice, refused if short."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from afferent.errors import StoreFull
from afferent.runtime import memory
from afferent.store import advice, backing
from afferent.store.arena import ArenaMap
from afferent.store.backing import AHEAD_NBYTES, CHUNK_NBYTES, Backing
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.client.local_store import LocalStore
from afferent.store.daemon.server import StoreServer
from afferent.store.segment import create_segment, open_segment
from afferent.types import MiB, ObjectKind

FEATURES = {ObjectKind.FEATURES: 1.0}
CAPACITY = 8 * CHUNK_NBYTES


def taken_nbytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


@pytest.fixture
def fd() -> Iterator[int]:
    fd = open_segment(CAPACITY)
    yield fd
    wait_for_threads()
    os.close(fd)


@dataclass
class Machine:
    """The machine's memory, as `Backing` queries it."""

    available: int = 1 << 40

    def available_nbytes(self) -> int:
        return self.available

    def limit_nbytes(self) -> int:
        return 1 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Replace the machine's memory by an amount that the test sets; retry refusals at once."""
    machine = Machine()
    monkeypatch.setattr(backing, "memory", machine)
    monkeypatch.setattr(backing, "_TRY_AGAIN_S", 0.0)
    return machine


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "arena":
            thread.join()


def test_what_is_asked_for_has_memory_in_whole_chunks(fd: int) -> None:
    backed = Backing(fd, ahead=False)
    assert taken_nbytes(fd) == 0
    assert backed.back(10, 20) == CHUNK_NBYTES
    assert backed.back(CHUNK_NBYTES - 1, CHUNK_NBYTES + 1) == 2 * CHUNK_NBYTES
    assert taken_nbytes(fd) == 2 * CHUNK_NBYTES
    assert backed.back(0, CAPACITY) == CAPACITY == taken_nbytes(fd)


def test_the_chunk_after_what_is_used_is_got_ahead_of_its_use(fd: int) -> None:
    backed = Backing(fd, ahead=True)
    backed.prepare([0])
    wait_for_threads()
    assert taken_nbytes(fd) == AHEAD_NBYTES == 2 * CHUNK_NBYTES
    assert backed.back(0, 1) == CHUNK_NBYTES
    wait_for_threads()
    assert taken_nbytes(fd) == CHUNK_NBYTES + AHEAD_NBYTES
    assert backed.back(3 * CHUNK_NBYTES, CAPACITY) == CAPACITY
    wait_for_threads()
    assert taken_nbytes(fd) == CAPACITY, "after the last chunk there is none"


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the machine's settings: huge pages are given to memory that asks for them."""
    (tmp_path / "shmem_enabled").write_text("always within_size [advise] never\n")
    (tmp_path / "hpage_pmd_size").write_text(f"{2 * MiB}\n")
    monkeypatch.setattr(backing, "_HUGE_PAGES", tmp_path)
    monkeypatch.setattr(backing, "_huge_pages", backing.HugePages())
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the size of each range that the kernel is asked to fill."""
    found: list[int] = []

    def advise(address: int, nbytes: int, advice_: int) -> int:
        if advice_ == advice.POPULATE_WRITE:
            found.append(nbytes)
        return advice.advise(address, nbytes, advice_)

    stand_in = SimpleNamespace(**{**vars(advice), "advise": advise})
    monkeypatch.setattr(backing, "advice", stand_in)
    return found


@pytest.mark.parametrize(
    ("file", "text", "is_asked"),
    [
        ("shmem_enabled", "always within_size [advise] never", True),
        ("shmem_enabled", "always within_size advise [never]", False),
        ("shmem_enabled", None, False),
        ("hpage_pmd_size", str(512 * MiB), False),
        ("hpage_pmd_size", "?", False),
    ],
)
def test_memory_is_cleared_however_the_system_gives_huge_pages(
    file: str, text: str | None, is_asked: bool, fd: int, offered: Path, asked: list[int]
) -> None:
    (offered / file).unlink()
    if text is not None:
        (offered / file).write_text(text)
    allocated = Backing(fd, ahead=False)
    assert allocated.back(CHUNK_NBYTES, CHUNK_NBYTES + 1) == 2 * CHUNK_NBYTES
    assert taken_nbytes(fd) == CHUNK_NBYTES
    assert not any(os.pread(fd, CHUNK_NBYTES, CHUNK_NBYTES))
    assert backing.has_memory(fd, CHUNK_NBYTES, 2 * CHUNK_NBYTES)
    assert bool(asked) == is_asked


def test_after_an_expensive_huge_page_memory_comes_in_small_ones(
    fd: int, offered: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the chunk, and some chunks more; then it is tried again."""
    monkeypatch.setattr(backing, "_MOST_HUGE_S", 0.0)
    monkeypatch.setattr(backing, "_PAUSE_NBYTES", 3 * CHUNK_NBYTES)
    allocated = Backing(fd, ahead=False)
    for number, expected in enumerate((1, 1, 1, 2, 2)):
        assert allocated.back(number * CHUNK_NBYTES, (number + 1) * CHUNK_NBYTES)
        assert len(asked) == expected
    assert set(asked) == {2 * MiB}
    assert taken_nbytes(fd) == 5 * CHUNK_NBYTES
    assert not any(os.pread(fd, 5 * CHUNK_NBYTES, 0))


def test_without_the_kernels_help_memory_is_written(
    fd: int, offered: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = SimpleNamespace(**{**vars(advice), "advise": lambda *_: errno.EINVAL})
    monkeypatch.setattr(backing, "advice", refusing)
    assert Backing(fd, ahead=False).back(0, CHUNK_NBYTES) == CHUNK_NBYTES
    assert taken_nbytes(fd) == CHUNK_NBYTES


def test_memory_that_was_used_is_not_cleared(fd: int) -> None:
    """A daemon that restarts prepares chunks that a process still reads."""
    for offset, nbytes in ((7, 3), (CHUNK_NBYTES, 1), (3 * CHUNK_NBYTES - 1, 1)):
        os.pwrite(fd, b"\1" * nbytes, offset)
    backed = Backing(fd, ahead=True)
    backed.prepare([0, 2 * CHUNK_NBYTES])
    wait_for_threads()
    assert taken_nbytes(fd) == 4 * CHUNK_NBYTES
    with ArenaMap(fd, writable=False) as arena:
        used = np.flatnonzero(np.frombuffer(arena.block(0, 4 * CHUNK_NBYTES), np.uint8))
    assert used.tolist() == [7, 8, 9, CHUNK_NBYTES, 3 * CHUNK_NBYTES - 1]


def test_many_calls_at_once_allocate_each_chunk_once(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, int]] = []

    def give_memory(_: int, start: int, end: int) -> None:
        written.append((start, end))
        backing_give_memory(fd, start, end)

    backing_give_memory = backing.give_memory
    monkeypatch.setattr(backing, "give_memory", give_memory)
    backed = Backing(fd, ahead=True)
    with ThreadPoolExecutor(8) as pool:
        ends = list(pool.map(lambda _: backed.back(0, CAPACITY), range(64)))
    wait_for_threads()
    assert set(ends) == {CAPACITY}
    assert sorted(written) == [
        (start, start + CHUNK_NBYTES) for start in range(0, CAPACITY, CHUNK_NBYTES)
    ]


def test_the_machine_keeps_a_part_of_its_memory(fd: int, machine: Machine) -> None:
    backed = Backing(fd, ahead=False)
    machine.available = CHUNK_NBYTES + (1 << 30) // 20 + 1
    assert backed.back(0, 1) == CHUNK_NBYTES
    machine.available -= 2
    assert backed.back(CHUNK_NBYTES + 5, CAPACITY) == CHUNK_NBYTES + 5
    assert backed.has_refused
    assert taken_nbytes(fd) == CHUNK_NBYTES
    machine.available += 2
    assert backed.back(CHUNK_NBYTES, CHUNK_NBYTES + 1) == 2 * CHUNK_NBYTES
    assert not backed.has_refused


def test_after_a_refusal_nothing_is_asked_for_a_while(
    fd: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(backing, "_TRY_AGAIN_S", 1.0)
    monkeypatch.setattr(backing.time, "monotonic", lambda: now.s)
    backed, machine.available = Backing(fd, ahead=True), 0
    assert backed.back(0, 1) == 0
    machine.available = 1 << 40
    now.s += 0.99
    assert backed.back(0, 1) == 0
    backed.prepare([0])
    wait_for_threads()
    assert taken_nbytes(fd) == 0
    now.s += 0.02
    assert backed.back(0, 1) == CHUNK_NBYTES


def test_a_kernel_that_refuses_is_heard(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backing.os, "pwrite", refuse)
    assert Backing(fd, ahead=False).back(0, 1) == 0


def test_memory_that_a_former_daemon_got_is_there(fd: int, machine: Machine) -> None:
    """A daemon that restarts on a machine without free memory still uses the allocated chunks."""
    Backing(fd, ahead=False).back(0, 2 * CHUNK_NBYTES)
    with ArenaMap(fd, writable=True) as arena:
        arena.block(0, 2 * CHUNK_NBYTES)[:] = bytes(2 * CHUNK_NBYTES)
        machine.available = 0
        assert Backing(fd, ahead=False).back(0, 4 * CHUNK_NBYTES) == 2 * CHUNK_NBYTES


def test_an_arena_that_was_allocated_as_a_whole_needs_nothing(machine: Machine) -> None:
    machine.available = CAPACITY * 2
    fd = create_segment(CAPACITY)
    machine.available = 0
    assert Backing(fd, ahead=False).back(5, CAPACITY) == CAPACITY
    os.close(fd)


def test_to_map_an_arena_takes_none_of_its_memory(fd: int) -> None:
    backed = Backing(fd, ahead=False)
    with ArenaMap(fd, writable=True) as one, ArenaMap(fd, writable=False) as other:
        assert taken_nbytes(fd) == 0
        backed.back(CHUNK_NBYTES, CHUNK_NBYTES + 1)
        for arena in (one, other):
            arena.block(CHUNK_NBYTES, CHUNK_NBYTES)
            arena.wait_populated()
            arena.block(0, 0)
            arena.block(CAPACITY, 0)
        assert taken_nbytes(fd) == CHUNK_NBYTES


def test_without_a_thread_to_be_had_pages_come_one_by_one(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    backed = Backing(fd, ahead=True)
    assert backed.back(0, 1) == CHUNK_NBYTES
    with ArenaMap(fd, writable=True) as arena:
        arena.block(0, 4)[:] = b"here"
        arena.wait_populated()
        assert bytes(arena.block(0, 4)) == b"here"


def test_an_idle_store_is_small_and_a_full_one_has_all_that_it_was_promised() -> None:
    with (
        StoreServer(CAPACITY, shares=FEATURES) as server,
        DaemonStore(server.address, name="t", writable=True) as store,
    ):
        store.put("r", {"x": np.arange(1000)})
        assert taken_nbytes(server.arena_fd) <= CHUNK_NBYTES + AHEAD_NBYTES
        assert store.stat().backed_nbytes == CHUNK_NBYTES
        handles = [store.put("r", {"x": np.full(MiB, n, np.uint8)}) for n in range(120)]
        for n, handle in enumerate(handles):
            with store.view(handle) as tree:
                assert (tree["x"] == n).all()
                del tree
        assert taken_nbytes(server.arena_fd) == CAPACITY
        assert store.stat().backed_nbytes == CAPACITY


def test_a_new_item_takes_memory_before_an_old_one_goes() -> None:
    with LocalStore(CAPACITY, shares=FEATURES) as store:
        for n in range(100):
            store.put(f"r{n}", {"x": np.zeros(MiB, np.uint8)}, key=bytes([n]) * 32)
            store.release(f"r{n}")
        assert store.stat().num_evicted == 0
        store.put("large", {"x": np.zeros(70 * MiB, np.uint8)})
        assert 0 < store.stat().num_evicted <= 70


def test_without_memory_the_store_is_full_and_goes_on(machine: Machine) -> None:
    with LocalStore(CAPACITY, shares=FEATURES) as store:
        store.put("one", {"x": np.zeros(20 * MiB, np.uint8)}, key=bytes(32))
        machine.available = 0
        with pytest.raises(StoreFull):
            store.put("two", {"x": np.zeros(20 * MiB, np.uint8)})
        store.release("one")
        store.put("two", {"x": np.zeros(20 * MiB, np.uint8)})
        assert store.stat().num_evicted == 1
        machine.available = 1 << 40
        store.put("three", {"x": np.zeros(80 * MiB, np.uint8)})
        assert memory.limit_nbytes() != machine.limit_nbytes(), "only the arena's is pretended"
