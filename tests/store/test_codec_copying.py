"""Large copies are exact: in pieces, with a helper thread, without one, and after a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from afferent.store.block import codec, copying
from tests.store.trees import same, store

_SIDE = 1800  # a float32 array of this side has 13 MB


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test begins without a helper thread."""
    copying._start_over()
    yield
    copying._start_over()


def num_helpers() -> int:
    return sum(thread.name.startswith("afferent-copy") for thread in threading.enumerate())


@pytest.fixture
def large(rng: np.random.Generator) -> np.ndarray:
    return rng.random((_SIDE, _SIDE), dtype=np.float32)


def test_all_shapes_and_strides(large: np.ndarray) -> None:
    for array in (
        large,
        large.T,
        large[::-1],
        large[None, :, None],
        large[:, ::2],
        large.reshape(-1),
        large.astype(large.dtype.newbyteorder(">")),
        np.broadcast_to(large[0], (_SIDE, _SIDE)),
    ):
        want = np.ascontiguousarray(array).astype(np.float32)
        assert same([want, 1], codec.view(store([array, 1])))


def test_many_tensors_in_one_tree(large: np.ndarray) -> None:
    tree = [{"pixels": large[:700] + number, "grid": np.arange(number)} for number in range(4)]
    assert same(tree, codec.view(store(tree)))


@pytest.mark.parametrize("dtype", ["bool", "uint8"])
def test_one_wide_row(dtype: str, rng: np.random.Generator) -> None:
    array = rng.integers(0, 2, (1, copying.SPLIT_NBYTES + 1)).astype(dtype)
    assert same([array], codec.view(store([array])))


def test_the_helper_starts_when_it_is_needed(large: np.ndarray) -> None:
    before = num_helpers()
    target = np.empty_like(large)
    copying.copy_all([(target[:100], large[:100])])
    copying.copy_all([(target, large)], num_threads=1)
    assert num_helpers() == before
    for _ in range(3):
        copying.copy_all([(target, large)])
    # An earlier test may have started the helper already.
    assert num_helpers() == min(1, len(os.sched_getaffinity(0)) - 1)


def test_one_core_is_enough(large: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    target = np.zeros_like(large)
    copying.copy_all([(target, large)])
    assert np.array_equal(target, large)


def test_no_thread_to_be_had(large: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy succeeds at the limit of threads, and while the interpreter shuts down."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copying.ThreadPoolExecutor, "submit", refuse)
    target = np.zeros_like(large)
    copying.copy_all([(target, large)])
    assert np.array_equal(target, large)


def test_callers_in_several_threads(large: np.ndarray) -> None:
    """All callers share one helper; a caller that gets no help copies alone."""
    targets = [np.zeros_like(large) for _ in range(6)]
    threads = [
        threading.Thread(target=copying.copy_all, args=([(target, large)],)) for target in targets
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(target, large) for target in targets)


def test_a_copy_that_fails(large: np.ndarray) -> None:
    """The error is raised, and no thread writes afterwards."""
    target = np.zeros_like(large)
    target.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copying.copy_all([(target, large)])
    copying.copy_all([(np.empty_like(large), large)])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_its_own_helper(large: np.ndarray) -> None:
    target = np.zeros_like(large)
    copying.copy_all([(target, large)])
    pid = os.fork()
    if pid == 0:
        again = np.zeros_like(large)
        copying.copy_all([(again, large)])
        os._exit(0 if np.array_equal(again, large) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
