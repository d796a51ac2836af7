"""Errors of the library reach the process that waits for a worker: by pickle, PyTorch or Ray."""

from __future__ import annotations

import copy
import gc
import inspect
import multiprocessing
import pickle
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

from afferent import errors
from afferent.errors import AfferentError

pytestmark = pytest.mark.timeout(120)

CLASSES = list(errors.walk())
HOLDER = errors.Holder(3, "trainer", 123, 4096, 64, 12.3)
SHORTAGE = errors.Shortage("features", 100, 8192, 4096, 64, 2, (HOLDER,))
TEXT = "the text that says what to do"
START_METHODS = ("fork", "spawn")


def sample(cls: type[AfferentError]) -> AfferentError:
    """Return an error with a value for each parameter of its class, and a note."""
    values: dict[str, Any] = {"param": errors.Param.PREVIOUS_ANSWER, "uuids": ("a", "b")}
    values |= {"retry_after_s": 7.5, "sequence_id": "chat-17"}
    values |= {"shortage": SHORTAGE}
    attributes = [name for name in inspect.signature(cls).parameters if name != "message"]
    error = cls(TEXT, **{name: values[name] for name in attributes})
    error.add_note("in a worker")
    return error


def raise_sample(number: int) -> None:
    raise sample(CLASSES[number])


def assert_same(error: BaseException, number: int) -> None:
    expected = sample(CLASSES[number])
    assert type(error) is type(expected)
    assert isinstance(error, AfferentError)
    assert (str(error), error.message, error.code) == (str(expected), TEXT, expected.code)
    assert error.__dict__ == expected.__dict__


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_error_survives_pickle(protocol: int) -> None:
    for number, cls in enumerate(CLASSES):
        assert_same(pickle.loads(pickle.dumps(sample(cls), protocol)), number)  # noqa: S301


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_every_error_survives_copy(duplicate: Any) -> None:
    for number, cls in enumerate(CLASSES):
        assert_same(duplicate(sample(cls)), number)


def test_every_error_without_text_survives_pickle_and_copy() -> None:
    for cls in CLASSES:
        for error in (pickle.loads(pickle.dumps(cls())), copy.deepcopy(cls())):  # noqa: S301
            assert (type(error), error.args, error.message) == (cls, cls().args, cls().message)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_made_of_a_text_alone(cls: type[AfferentError]) -> None:
    """The text may be positional or named: `torch._utils.ExceptionWrapper` names it."""
    for error in (cls(TEXT), cls(message=TEXT)):
        assert (error.args, str(error), error.message) == ((TEXT,), TEXT, TEXT)


@pytest.mark.parametrize("method", START_METHODS)
def test_every_error_of_a_pool_arrives(method: str) -> None:
    with multiprocessing.get_context(method).Pool(1) as pool:
        for number in range(len(CLASSES)):
            with pytest.raises(AfferentError) as caught:
                pool.apply(raise_sample, (number,))
            assert_same(caught.value, number)
            assert TEXT in str(caught.value.__cause__), "the worker's own traceback"


@pytest.mark.parametrize("method", START_METHODS)
def test_every_error_of_an_executor_arrives(method: str) -> None:
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(1, mp_context=context) as executor:
        futures = [executor.submit(raise_sample, number) for number in range(len(CLASSES))]
        for number, future in enumerate(futures):
            error = future.exception(timeout=60)
            assert error is not None
            assert_same(error, number)


def send_samples(pipe: Connection) -> None:
    for number in range(len(CLASSES)):
        try:
            raise_sample(number)
        except AfferentError as error:
            pipe.send(error)


@pytest.mark.parametrize("method", START_METHODS)
def test_every_error_arrives_through_a_pipe(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=send_samples, args=(theirs,))
    process.start()
    for number in range(len(CLASSES)):
        assert ours.poll(60)
        assert_same(ours.recv(), number)
    process.join(60)
    assert process.exitcode == 0


class Failing(Dataset[int]):
    def __len__(self) -> int:
        return len(CLASSES)

    def __getitem__(self, number: int) -> int:
        raise sample(CLASSES[number])


class FailingStream(IterableDataset[int]):
    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[int]:
        raise sample(CLASSES[self.number])


def assert_reraised(error: BaseException, cls: type[AfferentError]) -> None:
    """Check an error that PyTorch has created again, with the worker's traceback in its text."""
    assert type(error) is cls
    assert f"Caught {cls.__name__} in DataLoader worker process 0" in str(error)
    assert f"{cls.__name__}: {TEXT}" in str(error)
    assert f"{cls.__name__}: {TEXT}" in error.message, "also of a long traceback"
    assert len(error.message) <= 2000
    assert error.code == cls.code


@pytest.mark.parametrize("method", START_METHODS)
def test_every_error_of_a_data_loader_arrives(method: str) -> None:
    loader = DataLoader(
        Failing(), batch_size=None, num_workers=1, multiprocessing_context=method, timeout=60
    )
    samples = iter(loader)
    for cls in CLASSES:
        with pytest.raises(AfferentError) as caught:
            next(samples)
        assert_reraised(caught.value, cls)
    with pytest.raises(StopIteration):
        next(samples)


def test_an_error_of_an_iterable_data_loader_arrives() -> None:
    number = CLASSES.index(errors.StoreFull)
    loader = DataLoader(
        FailingStream(number), batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    with pytest.raises(errors.StoreFull) as caught:
        next(iter(loader))
    assert_reraised(caught.value, errors.StoreFull)


class RemoteTaskError(Exception):
    """A copy of Ray's `RayTaskError`, which `ray.get` raises when a task has failed."""

    def __init__(self, function_name: str, traceback_str: str, cause: BaseException) -> None:
        self.args = (function_name, traceback_str, cause)
        self.traceback_str, self.cause = traceback_str, cause

    def __str__(self) -> str:
        return self.traceback_str

    def as_instanceof_cause(self) -> Any:
        cause_cls: Any = type(self.cause)
        text = str(self)

        class Dual(RemoteTaskError, cause_cls):  # type: ignore[misc]
            def __init__(self, cause: BaseException) -> None:
                self.cause = cause
                self.args = (cause,)

            def __getattr__(self, name: str) -> Any:
                return getattr(self.cause, name)

            def __str__(self) -> str:
                return text

        return Dual(self.cause)


@pytest.fixture
def no_class_is_left() -> Iterator[None]:
    """Remove the error classes that a test has created: other tests list all classes."""
    yield
    gc.collect()
    assert list(errors.walk()) == CLASSES


@pytest.mark.usefixtures("no_class_is_left")
@pytest.mark.parametrize("number", range(len(CLASSES)), ids=lambda n: CLASSES[n].__name__)
def test_every_error_of_a_ray_task_arrives(number: int) -> None:
    """The cause is pickled; the raised error inherits from the cause's class."""
    try:
        raise_sample(number)
    except AfferentError as error:
        text = "".join(traceback.format_exception(error))
        cause = pickle.loads(pickle.dumps(error))  # noqa: S301
    raised = RemoteTaskError("task", text, cause).as_instanceof_cause()
    expected = sample(CLASSES[number])
    with pytest.raises(CLASSES[number], match=TEXT) as caught:
        raise raised
    assert (caught.value.message, caught.value.code) == (TEXT, expected.code)
    assert {name: getattr(raised, name) for name in expected.__dict__} == expected.__dict__
    assert TEXT in "".join(traceback.format_exception(raised))
