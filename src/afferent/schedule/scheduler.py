"""Continuous batching: which sequences the engine works on in the next step. Pure.

Sequences are admitted first come first served, while fewer than ``max_num_seqs`` run. A step
prefills at most one of them, so that those which already stream are not held up by a burst, and
decodes one token of each of the others. Work per step follows what runs, not what ever ran.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from afferent.errors import StoreError


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True)
class _Sequence:
    id: str
    max_tokens: int
    num_tokens: int = 0
    prefilled: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine's worker does next: deltas only."""

    prefill: str | None
    decode: list[str] = field(default_factory=list)
    drop: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return self.prefill is None and not self.decode and not self.drop


class Scheduler:
    """Events: `add`, `abort`, `record`, `fail`. Action: `next_step`."""

    def __init__(self, *, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[str, _Sequence] = {}
        self._dropped: list[str] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, sequence_id: str, *, max_tokens: int) -> None:
        """A new sequence waits for its turn."""
        if sequence_id in self._running or any(s.id == sequence_id for s in self._waiting):
            raise StoreError(f"sequence {sequence_id} exists")
        self._waiting.append(_Sequence(sequence_id, max_tokens))

    def next_step(self) -> Step:
        """Admit what fits, and say what to do; empty when there is nothing."""
        while self._waiting and len(self._running) < self._max_num_seqs:
            admitted = self._waiting.popleft()
            self._running[admitted.id] = admitted
        prefill = next((s.id for s in self._running.values() if not s.prefilled), None)
        decode = [s.id for s in self._running.values() if s.prefilled]
        dropped, self._dropped = self._dropped, []
        return Step(prefill, decode, dropped)

    def record(self, sequence_id: str, *, is_eos: bool) -> FinishReason | None:
        """The worker made a token of this sequence; the reason if it was the last.

        A sequence that was aborted while the step ran is ignored.
        """
        sequence = self._running.get(sequence_id)
        if sequence is None:
            return None
        sequence.prefilled = True
        sequence.num_tokens += 1
        reason = None
        if is_eos:
            reason = FinishReason.STOP
        elif sequence.num_tokens >= sequence.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._end(sequence_id)
        return reason

    def is_running(self, sequence_id: str) -> bool:
        return sequence_id in self._running

    def abort(self, sequence_id: str) -> None:
        """Nobody wants this sequence any more; unknown ones are ignored."""
        if sequence_id in self._running:
            self._end(sequence_id)
        else:
            self._waiting = deque(s for s in self._waiting if s.id != sequence_id)

    def clear(self) -> list[str]:
        """The worker is gone, and its caches with it: every sequence there was."""
        lost = [*self._running, *(s.id for s in self._waiting)]
        self._running.clear()
        self._waiting.clear()
        self._dropped.clear()
        return lost

    def _end(self, sequence_id: str) -> None:
        del self._running[sequence_id]
        self._dropped.append(sequence_id)
