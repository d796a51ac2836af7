"""Pause after a call that took too long, for callers that can do without its answer. Pure."""

from __future__ import annotations

from typing import Final

LONGEST_S: Final = 5.0


class Pause:
    """As long as the wait before it, and twice as long with each further wait, up to 5 s.

    So a busy machine, on which one call was late, loses as much time again and no more; and a
    caller of a process that hangs waits for a small part of its time.
    """

    def __init__(self) -> None:
        self._length_s, self._until_s = 0.0, float("-inf")

    def is_over(self, now_s: float) -> bool:
        """Whether the next call may be made."""
        return now_s >= self._until_s

    def begin(self, now_s: float, *, waited_s: float) -> None:
        """Begin after a call that was not answered.

        Args:
            waited_s: Time for which the caller waited.
        """
        self._length_s = min(max(2 * self._length_s, waited_s), LONGEST_S)
        self._until_s = now_s + self._length_s

    def end(self) -> None:
        """Note an answer: the next pause is short again."""
        self._length_s = 0.0
