"""Test of a response format in a forked, sandboxed process.

The test may take long or much memory, or crash; it affects only its own process.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
from pathlib import Path
from typing import Final, NoReturn

import msgspec
from llguidance import LLMatcher, LLTokenizer
from msgspec import Struct

from afferent.builtin.engine.asked_form import Form
from afferent.builtin.engine.form.grammar import compile_form, no_answer, too_much
from afferent.errors import AfferentError, ConfigError, EngineUnavailable, InternalError
from afferent.media.workers import sandbox
from afferent.runtime.process import die_with_parent
from afferent.types import Failure, MiB, encode

CPU_S: Final = 5.0
"""Processor time for a format. It is a backstop: the limits of `grammar` and `sizes` are counts,
within which a format takes at most 0.3 s.
"""
MEMORY_NBYTES: Final = 64 * MiB
_NUM_TOKENS = 32
_NICENESS = 5
_CANT_BEGIN, _CANT_CONFINE = 75, 78
_SET = re.compile(rb"[^\0]")


class Verdict(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Result of a test.

    Attributes:
        failure: ``None``: the format can be followed.
        nbytes: Memory that it took.
    """

    failure: Failure | None
    nbytes: int = 0


verdict_decoder = msgspec.msgpack.Decoder(Verdict)


def run(tokenizer: LLTokenizer, form: Form, result_fd: int, parent_pid: int) -> NoReturn:
    """Run the forked process: write a `Verdict`, unless the process is ended before."""
    code = _CANT_BEGIN
    try:
        die_with_parent(parent_pid)
        _keep_nothing_but(result_fd)
        os.nice(_NICENESS)
        sandbox.enter(memory_nbytes=MEMORY_NBYTES)
        code = 1
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        os.write(result_fd, encode(_try(tokenizer, form)))
        code = 0
    except ConfigError:
        code = _CANT_CONFINE
    finally:
        os._exit(code)


def verdict_of_death(form: Form, status: int) -> Verdict:
    """Return the result of a test that ended without a `Verdict`.

    The format was too expensive, unless the process never came to compile it.

    Args:
        status: The status that `os.waitpid` returns.
    """
    code = os.waitstatus_to_exitcode(status)
    if code == _CANT_BEGIN:
        return Verdict(_failure(EngineUnavailable("a form can't be tried now; try again")))
    if code == _CANT_CONFINE:
        return Verdict(_failure(InternalError("a trial of a form can't be confined")))
    return Verdict(_failure(too_much(form, "time" if code == -signal.SIGPROF else "memory")))


def _try(tokenizer: LLTokenizer, form: Form) -> Verdict:
    before = sandbox.data_nbytes()
    try:
        _write(compile_form(tokenizer, form), form, tokenizer)
    except AfferentError as error:
        return Verdict(_failure(error))
    return Verdict(None, max(0, sandbox.data_nbytes() - before))


def _write(matcher: LLMatcher, form: Form, tokenizer: LLTokenizer) -> None:
    """Write the beginning of an answer, with random tokens.

    Raises:
        InvalidForm: A token mask takes too much, or no token can follow.
    """
    draw = random.Random(0)  # noqa: S311 the same for the same form
    for _ in range(_NUM_TOKENS):
        mask = bytearray(matcher.compute_bitmask())
        if matcher.is_error():
            raise no_answer(form) if "NoExtension" in matcher.get_error() else too_much(form)
        for end in tokenizer.eos_tokens:
            mask[end // 8] &= ~(1 << end % 8)
        token = _any_of(mask, draw)
        if token is None:
            if matcher.is_accepting():
                return
            raise no_answer(form)
        matcher.consume_token(token)


def _any_of(mask: bytearray, draw: random.Random) -> int | None:
    found = _SET.search(mask, draw.randrange(len(mask))) or _SET.search(mask)
    if found is None:
        return None
    byte = mask[found.start()]
    return 8 * found.start() + draw.choice([bit for bit in range(8) if byte >> bit & 1])


def _failure(error: AfferentError) -> Failure:
    return Failure(error.code, error.message)


def _keep_nothing_but(fd: int) -> None:
    """Close all other descriptors and silence stderr: code that takes over this process gets
    nothing.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    for other in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if other > 2 and other != fd:
            with contextlib.suppress(OSError):  # the folder's own is closed already
                os.close(other)
