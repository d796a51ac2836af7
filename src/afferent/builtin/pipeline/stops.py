"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StopMatcher:
    """Ends the text at the first stop string; withholds text that may begin one. Pure.

    Invariants:
        - ``_held`` is a prefix of a stop string, or empty.
    """

    stops: tuple[str, ...]
    is_included: bool = False
    """Whether the stop string is a part of the text."""
    met: str | None = None
    """Stop string that ended the text."""
    _held: str = field(default="")

    def feed(self, text: str, *, may_end: bool = True) -> str:
        """Return the text that can be sent now, after ``text`` has arrived.

        Args:
            may_end: Whether a stop string that is complete by the end of this text counts.
        """
        if self.met is not None:
            return ""
        pending = self._held + text
        if may_end and (found := self._first_in(pending)) is not None:
            start, end = found
            self.met, self._held = pending[start:end], ""
            return pending[: end if self.is_included else start]
        longest = max((len(stop) for stop in self.stops), default=1)
        for length in range(min(longest - 1, len(pending)), 0, -1):
            if any(stop.startswith(pending[-length:]) for stop in self.stops):
                self._held = pending[-length:]
                return pending[:-length]
        self._held = ""
        return pending

    def flush(self) -> str:
        """Return the withheld text, at the end."""
        held, self._held = self._held, ""
        return held

    def _first_in(self, pending: str) -> tuple[int, int] | None:
        """Return the stop string that is complete first: the result is independent of the pieces.

        One that was complete within the withheld text came when it did not count.
        """
        found = []
        for stop in self.stops:
            start = pending.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if not found:
            return None
        end, start = min(found)
        return start, end
