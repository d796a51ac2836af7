"""Stop strings in text that comes in pieces."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StopMatcher:
    """Ends the text at the first stop string; holds back what may be the start of one. Pure."""

    stops: tuple[str, ...]
    is_included: bool = False
    """The stop string itself is a part of the text."""
    met: str | None = None
    """The stop string that ended the text."""
    _held: str = field(default="")

    def feed(self, text: str, *, may_end: bool = True) -> str:
        """What can be sent for certain, now that ``text`` has come.

        Args:
            may_end: A stop string that is complete by the end of this text counts.
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
        """The text that was held back, once no more comes."""
        held, self._held = self._held, ""
        return held

    def _first_in(self, pending: str) -> tuple[int, int] | None:
        """The stop string that is complete first, so that it does not matter how text is cut.

        What was complete within the text that was held back came when it did not count.
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
