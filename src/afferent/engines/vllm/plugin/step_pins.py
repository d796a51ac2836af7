"""Pins of the engine core: on the features that the next steps encode.

vLLM assigns the names of an item's results (block hashes, for example) when it schedules a step. So
features have to be safe before that, and until the step has ended. The engine core holds them: by a
pin, against their eviction, and by a view, against a new store daemon (ADR 8).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from afferent.engines import quarantine
from afferent.engines.vllm.plugin.step import FeaturesLost, Located, Step
from afferent.errors import AfferentError
from afferent.store.client.daemon_store import DaemonStore
from afferent.store.protocol.items import MAX_ITEMS, Find, in_messages
from afferent.store.protocol.results import existing

log = logging.getLogger("vllm.afferent")

_WAIT_S: Final = 1e-3
_LONGEST_WAIT_S: Final = 1e-2
_WAIT_SHARE: Final = 0.05
"""Part of the time of a step for which its successor may wait: a request that is too late for it
waits for all of the step, and other requests wait as well.
"""
_PATIENCE_S: Final = 2.0
"""Longest deferral of a request while no store daemon is there."""
_KEPT_S: Final = 1.0
_EXPECTED_S: Final = 5.0
"""Longest lives of an answer that no request looks at, and of one that was asked for in advance: a
pin keeps memory. All of them end with their daemon, as a pin delays the start of a new one.
"""
_LOOK_AGAIN_S: Final = 0.02


@dataclass(slots=True, eq=False)
class _Pin:
    """Pinned features; the pin lives as long as ``view``, and waits for a request until then."""

    where: Located
    view: NDArray[np.uint8]
    until_s: float


class PinnedStep:
    """A step with its pins, which end with this object."""

    def __init__(self, step: Step, pins: Sequence[_Pin]) -> None:
        self.step, self._pins = step, pins


def longest_wait_s(step_s: float) -> float:
    """Return for how long a step may wait for the store, from the time of the step before it."""
    return min(max(_WAIT_S, _WAIT_SHARE * step_s), _LONGEST_WAIT_S)


class StepPins:
    """Pins for the step that is being scheduled. One thread schedules; another asks the store.

    A third one, which receives requests, has it ask in advance (`expect`): without that, each
    request would wait for the store while a step is scheduled, and miss that step if it is late.

    Invariants:
        - The scheduling thread waits for the store in a step for no longer than `longest_wait_s`.
        - A pin belongs to the step being scheduled, to a `PinnedStep`, or to the answers that no
          step has used yet. Those are dropped after ``_KEPT_S`` or ``_EXPECTED_S``, with the end
          of their request, and when the daemon is gone.
        - A request is lost if the store does not have its features any more, or if there is no
          store for ``_PATIENCE_S``. A silent store only defers it.
    """

    def __init__(self, open_store: Callable[[], DaemonStore]) -> None:
        """Create it, and begin to connect.

        Args:
            open_store: Opens the store, in the thread; called again while it fails.
        """
        self._open_store, self._engine = open_store, f"{os.getpid()}-{time.monotonic()}"
        self._store: DaemonStore | None = None
        self._lock = threading.Lock()
        self._asked, self._answered = threading.Event(), threading.Event()
        self._wanted: list[bytes] = []
        self._pending: set[bytes] = set()
        self._expecting: dict[bytes, set[str]] = {}
        """Requests that were announced and have not ended, by the keys that they need."""
        self._expected_of: dict[str, set[bytes]] = {}
        """The same, by request."""
        self._encoded: list[bytes] = []
        self._found: dict[bytes, _Pin] = {}
        self._absent: dict[bytes, float] = {}
        """By key, the time of the question."""
        self._gone_since_s: float | None = None
        self._is_closed = False
        # Of the scheduling thread only:
        self._step: dict[bytes, _Pin] = {}
        self._used: set[bytes] = set()
        self._lost: set[str] = set()
        self._deferred_s: dict[str, float] = {}
        """Requests that wait for answers, with the time of their first look."""
        self._left_s, self._ended_s = _WAIT_S, time.monotonic()
        self._num_leases = 0
        self._thread = threading.Thread(target=self._serve, name="afferent-pins", daemon=True)
        self._thread.start()

    # Any thread

    def expect(self, request_id: str, keys: Iterable[bytes]) -> None:
        """Ask for features that a request needs in a later step; `secure` finds the answer.

        An answer that they are absent does not count: see `_take`.
        """
        wanted = dict.fromkeys(keys)
        if not wanted or not self._is_open:
            return
        with self._lock:
            new = [key for key in wanted if key not in self._pending and key not in self._found]
            self._pending.update(new)
            self._expected_of.setdefault(request_id, set()).update(wanted)
            for key in wanted:
                self._expecting.setdefault(key, set()).add(request_id)
            self._wanted += new
        if new:
            self._asked.set()

    # The scheduling thread

    def secure(self, request_id: str, keys: Sequence[bytes]) -> bool:
        """Pin features for the step that is being scheduled.

        Returns:
            Whether all of them are pinned. If not, the request has to wait for a later step, or
            `take_lost` will name it.
        """
        missing = [key for key in dict.fromkeys(keys) if key not in self._step]
        if not missing:
            self._deferred_s.pop(request_id, None)
            return True
        until_s = time.monotonic() + self._left_s
        while (missing := self._take(request_id, missing)) and request_id not in self._lost:
            now_s = time.monotonic()
            if now_s >= until_s:
                break
            self._answered.wait(until_s - now_s)
        self._left_s = max(0.0, until_s - time.monotonic())
        if not missing or request_id in self._lost:
            self._deferred_s.pop(request_id, None)
        return not missing

    def use(self, key: bytes) -> None:
        """Note that the step encodes an item, whose features `secure` has pinned.

        Raises:
            FeaturesLost: They are not pinned, and can't be at once.
        """
        if key not in self._step:
            until_s = time.monotonic() + _PATIENCE_S
            while self._take("", [key]):
                if time.monotonic() > until_s:
                    raise FeaturesLost("an item is scheduled, and its features are gone")
                self._answered.wait(_LOOK_AGAIN_S)
            self.forget("")
        self._used.add(key)

    def end_step(self) -> PinnedStep:
        """Return the items of the scheduled step; pins that it does not use serve the next one."""
        now_s = time.monotonic()
        used = {key: pin for key, pin in self._step.items() if key in self._used}
        with self._lock:
            for key, pin in self._step.items():
                if key not in used or key in self._expecting:
                    pin.until_s = max(pin.until_s, now_s + _KEPT_S)
                    self._found[key] = pin
        self._step, self._used = {}, set()
        self._left_s, self._ended_s = longest_wait_s(now_s - self._ended_s), now_s
        items = {key: pin.where for key, pin in used.items()}
        return PinnedStep(Step(os.getpid(), items, self._engine), list(used.values()))

    def take_lost(self) -> set[str]:
        """Return the requests whose features are lost, once."""
        lost, self._lost = self._lost, set()
        return lost

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended, and drop the answers that it alone needed."""
        self._deferred_s.pop(request_id, None)
        self._drop(request_id)

    def report_encoded(self, request_id: str, keys: Iterable[bytes]) -> None:
        """Tell the store that a request has been computed up to the end of these items."""
        keys = list(keys)
        with self._lock:
            self._encoded += keys
        self._drop(request_id, keys)
        self._asked.set()

    def _drop(self, request_id: str, keys: Sequence[bytes] | None = None) -> None:
        """Drop the answers about some keys, or about all that a request expects, unless another
        request expects them.
        """
        dropped = []
        with self._lock:
            own = self._expected_of.get(request_id, set())
            ended = list(own if keys is None else keys)
            own.difference_update(ended)
            if not own:
                self._expected_of.pop(request_id, None)
            for key in ended:
                others = self._expecting.get(key, set())
                others.discard(request_id)
                if not others:
                    self._expecting.pop(key, None)
                    dropped.append(self._found.pop(key, None))
        del dropped  # the pins end outside of the lock

    def close(self) -> None:
        """End the thread, and the connection."""
        self._is_closed = True
        self._asked.set()
        self._thread.join()
        self._step.clear()
        self._found.clear()
        if self._store is not None:
            self._store.close()

    @property
    def _is_open(self) -> bool:
        return self._store is not None and self._store.is_open

    def _take(self, request_id: str, missing: Sequence[bytes]) -> list[bytes]:
        """Take the answers that have come, and ask for the rest; return what is not pinned.

        That features are absent counts if the question is younger than the request: before, its
        frontend may have made them.
        """
        since_s = self._deferred_s.setdefault(request_id, time.monotonic())
        with self._lock:
            if not self._is_open:
                self._found.clear()  # a new daemon waits for their end
            for key in missing:
                if (pin := self._found.pop(key, None)) is not None:
                    self._step[key] = pin
            left = [key for key in missing if key not in self._step]
            is_absent = any(self._absent.get(key, 0.0) >= since_s for key in left)
            is_lost = is_absent or (bool(left) and self._is_gone_for_long())
            new = [key for key in left if key not in self._pending] if not is_lost else []
            self._pending.update(new)
            self._wanted += new
            self._answered.clear()
        if is_lost and request_id:
            log.warning("the features of request %s are lost; it fails, to be retried", request_id)
            self._lost.add(request_id)
        if new:
            self._asked.set()
        return left

    def _is_gone_for_long(self) -> bool:
        """Whether no store daemon has been there for ``_PATIENCE_S``. The lock must be held."""
        now_s = time.monotonic()
        if self._is_open:
            self._gone_since_s = None
        elif self._gone_since_s is None:
            self._gone_since_s = now_s
        return self._gone_since_s is not None and now_s - self._gone_since_s > _PATIENCE_S

    # The thread that asks the store

    def _serve(self) -> None:
        store = self._connect()
        while not self._is_closed and store is not None:
            self._asked.wait(_KEPT_S)
            self._asked.clear()
            self._tidy(is_open=store.is_open)
            with self._lock:
                wanted, self._wanted = self._wanted, []
                encoded, self._encoded = self._encoded, []
            store.report_encoded(encoded)
            for some in in_messages(wanted, most=MAX_ITEMS // 2):  # a question has two for each
                try:
                    self._ask(store, some)
                except Exception:  # the requests ask again
                    log.exception("features were not looked for")
                    time.sleep(_LOOK_AGAIN_S)
                finally:
                    with self._lock:
                        self._pending.difference_update(some)
                        self._answered.set()

    def _connect(self) -> DaemonStore | None:
        while not self._is_closed:
            try:
                self._store = self._open_store()
            except AfferentError:
                time.sleep(_LOOK_AGAIN_S)
                continue
            except Exception:
                log.exception("no connection to the store")
                time.sleep(_KEPT_S)
                continue
            return self._store
        return None

    def _ask(self, store: DaemonStore, wanted: Sequence[bytes]) -> None:
        """Ask the store for features, and note the answers; ask again later without an answer."""
        self._num_leases += 1
        lease, arena, asked_s = f"step-{self._num_leases}", store.arena, time.monotonic()
        found: dict[bytes, _Pin] = {}
        absent: set[bytes] = set()
        try:
            records = [quarantine.record_key(key) for key in wanted]
            outcomes = store.acquire(lease, [Find(key) for key in (*wanted, *records)])
            now_s = time.monotonic()
            for key, outcome, record in zip(
                wanted, outcomes[: len(wanted)], outcomes[len(wanted) :], strict=True
            ):
                handle, record_handle = existing(outcome), existing(record)
                if handle is None or (
                    record_handle is not None and quarantine.is_active(store.block(record_handle))
                ):
                    absent.add(key)
                else:
                    view = store.bytes_for(lease, handle)
                    until_s = now_s + (_EXPECTED_S if key in self._expecting else _KEPT_S)
                    if store.arena is arena:
                        found[key] = _Pin(Located(arena.identity, handle), view, until_s)
        except AfferentError as error:  # it is gone, or silent: it may be busy, or stopped
            log.debug("features were not looked for: %s", error.code)
            time.sleep(_LOOK_AGAIN_S)
        finally:
            store.forget(lease)  # the views keep pins of their own
        with self._lock:
            self._found.update(found)
            self._absent.update(dict.fromkeys(absent, asked_s))

    def _tidy(self, *, is_open: bool) -> None:
        """Drop answers that no request has looked at."""
        now_s = time.monotonic() if is_open else float("inf")
        with self._lock:
            if is_open:
                self._gone_since_s = None
            self._found = {k: pin for k, pin in self._found.items() if pin.until_s > now_s}
            self._absent = {k: at_s for k, at_s in self._absent.items() if at_s > now_s - _KEPT_S}
