"""Process that tests response formats, each in a fork of itself.

    python -m afferent.builtin.engine.form.main FD      (started by the supervisor)

It has the model's tokenizer and nothing else, and never a thread: a fork of a process with threads
may hang. The engine core sends formats; the process reports whether each can be followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
from pathlib import Path

from llguidance import LLTokenizer

from afferent.builtin.engine import messages as m
from afferent.builtin.engine.asked_form import Form
from afferent.builtin.engine.form import trial
from afferent.builtin.engine.form.grammar import tokenizer_of
from afferent.builtin.engine.form.trial import Verdict
from afferent.builtin.engine.launch import FormSettings
from afferent.errors import (
    ConfigError,
    ConnectionClosed,
    EngineUnavailable,
    InternalError,
    UnsupportedParameter,
)
from afferent.media.families.family import read_json
from afferent.media.workers import sandbox
from afferent.runtime import wire
from afferent.runtime.process import LOST_PARTNERS, ChildProcess, run_until_terminated
from afferent.types import Failure, decode, encode

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 30.0
_TRIAL_TIMEOUT_S = 10.0
"""Timeout of a test; most of it is for the wait for processor time."""
_MAX_VERDICT_NBYTES = 1 << 16
_UNTRIED = "the form of the answer could not be tried"


class FormTrials:
    """Tests the formats that the core sends, concurrently: the core sends a few at a time.

    Invariants:
        - Each request gets exactly one answer, unless the connection is lost.
        - A forked process is always killed and reaped.
    """

    def __init__(self, tokenizer: LLTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._channel = wire.AsyncChannel(self._on_frame, self._on_close)
        self._is_cut = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, address: str) -> None:
        """Answer the core until it is gone.

        Raises:
            ConnectionClosed: The core is gone.
        """
        await self._channel.attach(wire.connect(address, timeout_s=_CONNECT_TIMEOUT_S))
        self._channel.send(encode(m.FormsHello()))
        await self._is_cut.wait()
        raise ConnectionClosed("the core is gone")

    def _on_frame(self, frame: bytes) -> None:
        task = asyncio.create_task(self._answer(decode(m.to_forms_decoder, frame)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_close(self) -> None:
        self._is_cut.set()

    async def _answer(self, asked: m.TryForm) -> None:
        try:
            verdict = await self.verdict(asked)
        except Exception:  # a request without an answer would block the core's queue
            log.exception("a form could not be tried")
            verdict = Verdict(Failure(InternalError.code, _UNTRIED))
        with contextlib.suppress(ConnectionClosed):
            self._channel.send(encode(m.FormTried(asked.number, verdict.failure, verdict.nbytes)))

    async def verdict(self, asked: m.TryForm) -> Verdict:
        """Return the result of a test in a fork of this process."""
        if self._tokenizer is None:
            refused = UnsupportedParameter("no answers of a given form can be had of this model")
            return Verdict(Failure(refused.code, refused.message))
        try:
            return await self._tried(self._tokenizer, asked.form)
        except OSError as error:  # out of memory, processes or files, perhaps for a moment
            log.warning("a form can't be tried", extra={"reason": error.strerror})
            return Verdict(Failure(EngineUnavailable.code, f"{_UNTRIED}; try again"))

    async def _tried(self, tokenizer: LLTokenizer, form: Form) -> Verdict:
        parent, (result_fd, child_fd) = os.getpid(), os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(result_fd)
            os.close(child_fd)
            raise
        if pid == 0:
            signal.set_wakeup_fd(-1)
            trial.run(tokenizer, form, child_fd, parent)
        os.close(child_fd)
        said, is_late = b"", False
        try:
            async with asyncio.timeout(_TRIAL_TIMEOUT_S):
                said = await _read_all(result_fd)
        except TimeoutError:
            is_late = True
        finally:
            os.kill(pid, signal.SIGKILL)  # a process that has closed its pipe ends by itself
            _, status = os.waitpid(pid, 0)  # noqa: ASYNC222 it is dying
        if is_late:
            return Verdict(Failure(EngineUnavailable.code, f"{_UNTRIED} in time; try again"))
        if status or not said:
            log.debug("a trial of a form died", extra={"status": status})
            return trial.verdict_of_death(form, status)
        return decode(trial.verdict_decoder, said)


async def _read_all(fd: int) -> bytes:
    """Return the bytes written into a pipe until it is closed, within the limit; close this end."""
    loop, reader, said = asyncio.get_running_loop(), asyncio.StreamReader(), b""
    pipe = os.fdopen(fd, "rb", buffering=0)
    try:
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
    except OSError:
        pipe.close()
        raise
    try:
        while len(said) < _MAX_VERDICT_NBYTES and (more := await reader.read(_MAX_VERDICT_NBYTES)):
            said += more
        return said
    finally:
        transport.close()


def load_tokenizer(folder: Path) -> LLTokenizer | None:
    """Return the tokenizer; ``None``: this model supports no response formats."""
    generation, config = folder / "generation_config.json", read_json(folder / "config.json")
    known = {**config.get("text_config", {}), **config}
    known |= read_json(generation) if generation.exists() else {}
    eos = known.get("eos_token_id")
    # Only whether a form can be followed is tested. So if the folder does not name the token that
    # ends answers, any other will do.
    ends = [eos] if isinstance(eos, int) else eos or [0]
    try:
        return tokenizer_of(folder, eos_token_ids=ends)
    except ConfigError as error:
        log.info("no answers of a given form", extra={"reason": error.message})
        return None


async def _run(child: ChildProcess, settings: FormSettings, trials: FormTrials) -> None:
    child.report("forms of answers", ready=True)
    await run_until_terminated(trials.serve(settings.core_address), child.keep_beating())


def main() -> None:
    child = ChildProcess.start()
    settings = child.settings(FormSettings)
    try:
        sandbox.check_machine()
    except ConfigError as error:
        child.report(error.message)
        raise SystemExit(1) from error
    trials = FormTrials(load_tokenizer(Path(settings.model_folder)))
    gc.freeze()  # or a fork's first collection would copy the pages of all that is loaded
    try:
        asyncio.run(_run(child, settings, trials))
    except ConnectionClosed:
        log.info("the core is gone")
        raise SystemExit(LOST_PARTNERS) from None


if __name__ == "__main__":
    main()
