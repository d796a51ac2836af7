"""A preprocess worker ends at SIGTERM, also if the signal comes between two jobs."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from afferent.config import Limits
from afferent.media.families.reencoded import ReencodedFamily
from afferent.media.workers.worker import Worker


class Job(Exception):
    """The worker waits for a job, where it would wait without end."""


class Waiting:
    """A store without jobs."""

    def take(self) -> Any:
        raise Job


class Signalled(Worker):
    """A worker to which SIGTERM comes just before it is idle, or just after."""

    def __init__(self, *, is_before: bool) -> None:
        store: Any = Waiting()
        self.__dict__["is_before"] = is_before
        super().__init__(store, ReencodedFamily(), name="worker", limits=Limits(), item_cpu_s=60.0)

    def __setattr__(self, name: str, value: Any) -> None:
        is_moment = name == "_is_idle" and value
        if is_moment and self.__dict__["is_before"]:
            self._stop(signal.SIGTERM, None)
        super().__setattr__(name, value)
        if is_moment and not self.__dict__["is_before"]:
            self._stop(signal.SIGTERM, None)


@pytest.fixture(autouse=True)
def _keep_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)


def test_signal_before_it_is_idle_ends_it_without_another_job() -> None:
    Signalled(is_before=True).run()


def test_signal_while_it_is_idle_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(BaseException):
        pass

    def end(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended, match="0"):
        Signalled(is_before=False).run()
