"""A worker's answers to the core when the model fails."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from afferent.builtin.engine import messages as m
from afferent.builtin.engine.model.runner import Runner
from afferent.builtin.engine.worker.encoding import ItemEncoder
from afferent.builtin.engine.worker.main import EngineWorker
from afferent.engines.protocol import Chosen
from afferent.errors import ConnectionClosed, InvalidPlaceholders, UnusableEmbeddings
from afferent.runtime import wire
from afferent.schedule.step import Chunk
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.client.local_store import LocalStore
from afferent.types import Failure, MiB, Sampling, decode, encode


class FragileRunner:
    """A runner in which a sequence fails as its name says."""

    def __init__(self) -> None:
        self.dropped: list[str] = []
        self.failed: dict[str, Failure] = {}

    def begin(
        self,
        sequence_id: str,
        token_ids: list[int],
        items: Any,
        sampling: Any,
        *,
        num_answered: int,
        form_nbytes: int,
        has_answer: bool,
        reuse: Any,
    ) -> None:
        if sequence_id == "misplaced":
            raise InvalidPlaceholders("not in order")

    def run(self, chunks: list[Chunk], decode: list[str], embeddings: Any) -> list[Chosen]:
        names = [chunk.sequence_id for chunk in chunks] + decode
        if "unfilled" in names:
            raise UnusableEmbeddings(sequence_id="unfilled")
        if "breaks" in names:
            raise RuntimeError
        lost = Failure("invalid_form", "too much")
        self.failed = {name: lost for name in names if name == "too much"}
        return [Chosen(name, 5) for name in names]

    def finish(self, sequence_id: str) -> None:
        pass

    def drop(self, sequence_id: str) -> None:
        self.dropped.append(sequence_id)


class Core:
    """The core's end of a worker's connection."""

    def __init__(self, channel: wire.SyncChannel, runner: FragileRunner) -> None:
        self._channel, self.runner = channel, runner

    def ask(self, *prefill: str, decode: list[str] | None = None) -> None:
        begin = [m.Begin(name, [1, 2], [], Sampling(max_tokens=1)) for name in prefill]
        chunks = [Chunk(name, 0, 2, True) for name in prefill]
        work = m.Work(7, begin=begin, prefill=chunks, decode=decode or [])
        self._channel.send(encode(work), timeout_s=60)

    def answer(self) -> m.WorkDone:
        done = decode(m.to_core_decoder, self._channel.receive(timeout_s=60))
        assert isinstance(done, m.WorkDone)
        assert done.number == 7
        return done


@contextlib.contextmanager
def worker(*, has_partners: bool) -> Iterator[tuple[Core, list[Exception]]]:
    """Run a worker in a thread; yield the exception with which it ended."""
    ours, theirs = socket.socketpair()
    ends: list[Exception] = []
    with ours, theirs, LocalStore(MiB) as store:
        runner = FragileRunner()
        encoder = ItemEncoder(cast(Runner, runner), cast(DaemonStore, store),
                              published=None, page_lock=None)  # fmt: skip
        engine = EngineWorker(
            cast(Runner, runner), encoder, cast(DaemonStore, store), wire.SyncChannel(theirs),
            has_partners=has_partners,
        )  # fmt: skip

        def run() -> None:
            try:
                engine.run()
            except Exception as error:
                ends.append(error)
                theirs.close()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield Core(wire.SyncChannel(ours), runner), ends
        finally:
            ours.close()
            thread.join(60)
    assert len(ends) == 1


def codes(done: m.WorkDone) -> dict[str, str]:
    return {sequence_id: failure.code for sequence_id, failure in done.failed_sequences}


def test_one_sequence_fails_alone() -> None:
    with worker(has_partners=True) as (core, _):
        core.ask("fine", "misplaced", "unfilled", decode=["goes on"])
        done = core.answer()
        assert [chosen.sequence_id for chosen in done.chosen] == ["fine", "goes on"]
        assert codes(done) == {
            "misplaced": "invalid_placeholders",
            "unfilled": "unusable_embeddings",
        }
        assert core.runner.dropped == ["misplaced", "unfilled"]
        assert [sequence_id for sequence_id, _ in done.spans] == ["fine"]


def test_one_whose_form_can_not_be_followed_fails_alone() -> None:
    with worker(has_partners=True) as (core, _):
        core.ask("fine", decode=["goes on", "too much"])
        done = core.answer()
        assert codes(done) == {"too much": "invalid_form"}
        assert core.runner.dropped == ["too much"]
        core.ask(decode=["goes on"])
        assert codes(core.answer()) == {}


def test_a_step_that_breaks_fails_all_its_sequences() -> None:
    with worker(has_partners=False) as (core, ends):
        for _ in range(2):
            core.ask("breaks", decode=["other"])
            done = core.answer()
            assert codes(done) == {"breaks": "internal_error", "other": "internal_error"}
            core.ask("fine")
            assert [chosen.token_id for chosen in core.answer().chosen] == [5]
        core.ask("breaks")
        core.answer()
        core.ask("breaks")
        with pytest.raises(ConnectionClosed):
            core.answer()
        assert isinstance(ends[0], RuntimeError), "twice in a row: it is of no use any more"


def test_a_worker_with_partners_ends_when_a_step_breaks() -> None:
    with worker(has_partners=True) as (core, ends):
        core.ask("breaks")
        with pytest.raises(ConnectionClosed):
            core.answer()
        assert isinstance(ends[0], RuntimeError)
