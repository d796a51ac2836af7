"""Response formats in the engine core: a separate process tests them.

The result of a test is cached by the format's content, so that a format is tested once. Waiting
tests share the test time fairly between tenants.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from dataclasses import dataclass

from afferent.admission.shares import FairQueue, Share
from afferent.builtin.engine import messages as m
from afferent.builtin.engine.asked_form import Form
from afferent.errors import EngineUnavailable, InvalidForm, error_from
from afferent.runtime import wire
from afferent.types import encode

_MAX_KNOWN = 1024
_MAX_WAITING = 64
_NUM_AT_ONCE = 2
_EXPECTED_S = 0.02
"""Expected time of a test; the tenant is charged for the real time."""
_AWAY = "forms of answers can't be looked at now; try again"


@dataclass(slots=True, eq=False)
class _Trial:
    """Test of one format, for all requests that wait for it; ``share``: of the first request."""

    form: Form
    share: Share
    future: asyncio.Future[m.FormTried]
    sent_s: float = 0.0


class Forms:
    """Tests each format once. The test process comes by `attach`, and goes by `detach`.

    Invariants:
        - Each test in ``_trials`` is either in ``_waiting`` or in ``_running``.
        - At most ``_NUM_AT_ONCE`` tests run.
        - Only final results (success, or `InvalidForm`) are cached.
    """

    def __init__(self) -> None:
        self._channel: wire.AsyncChannel | None = None
        self._numbers = itertools.count()
        self._known: OrderedDict[bytes, m.FormTried] = OrderedDict()
        self._trials: dict[bytes, _Trial] = {}
        self._waiting: FairQueue[_Trial] = FairQueue()
        self._running: dict[int, _Trial] = {}

    async def check(self, form: Form, share: Share) -> int:
        """Return the memory that answers of this format take to be followed, in bytes.

        Raises:
            InvalidForm: No answer is possible, or it would take too much.
            EngineUnavailable: The format can't be tested now.
        """
        key = form.key
        if (tried := self._known.get(key)) is not None:
            self._known.move_to_end(key)
        else:
            trial = self._trials.get(key) or self._ask(key, form, share)
            tried = await asyncio.shield(trial.future)
        if tried.failure is not None:
            raise error_from(tried.failure.code, tried.failure.message)
        return tried.nbytes

    def attach(self, channel: wire.AsyncChannel) -> None:
        self._channel = channel

    def detach(self, channel: wire.AsyncChannel) -> None:
        """Fail the requests whose tests were pending in this process."""
        if self._channel is not channel:
            return
        self._channel = None
        trials, self._trials = self._trials, {}
        self._waiting, self._running = FairQueue(), {}
        for trial in trials.values():
            if not trial.future.done():
                trial.future.set_exception(EngineUnavailable(_AWAY))
                trial.future.exception()  # mark it as retrieved: perhaps no request waits for it

    def on_tried(self, tried: m.FormTried) -> None:
        trial = self._running.pop(tried.number, None)
        if trial is None:
            return
        self._waiting.charge(trial.share, time.monotonic() - trial.sent_s - _EXPECTED_S)
        key = trial.form.key
        if tried.failure is None or tried.failure.code == InvalidForm.code:
            self._known[key] = tried
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        del self._trials[key]
        if not trial.future.done():
            trial.future.set_result(tried)
        self._send()

    def _ask(self, key: bytes, form: Form, share: Share) -> _Trial:
        if self._channel is None or not self._channel.is_open:
            raise EngineUnavailable(_AWAY)
        if not self._waiting.has_place(share, _MAX_WAITING):
            raise EngineUnavailable(_AWAY)
        trial = _Trial(form, share, asyncio.get_running_loop().create_future())
        self._trials[key] = trial
        self._waiting.push(trial, share=share, flow=key, cost=_EXPECTED_S)
        self._send()
        return trial

    def _send(self) -> None:
        while self._channel is not None and self._channel.is_open:
            if len(self._running) >= _NUM_AT_ONCE or (trial := self._waiting.pop()) is None:
                return
            number, trial.sent_s = next(self._numbers), time.monotonic()
            self._running[number] = trial
            self._channel.send(encode(m.TryForm(number, trial.form)))
