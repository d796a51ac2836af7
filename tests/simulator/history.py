"""History of a run: a digest that compares two runs, and a diagram for people."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

_AT = struct.Struct("<d")


class Event(NamedTuple):
    """Event of ``who``; with ``to``, a message from ``who`` to ``to``."""

    at_s: float
    who: str
    what: str | bytes
    to: str = ""


class History:
    """All messages between processes, and all changes of the processes.

    Args:
        keeps: Whether events are stored for reading; the digest covers them in any case.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self.events: list[Event] = []
        self._keeps = keeps
        self._digest = hashlib.blake2b(digest_size=16)

    def note(self, at_s: float, who: str, what: str | bytes, to: str = "") -> None:
        data = what if isinstance(what, bytes) else what.encode()
        self._digest.update(_AT.pack(at_s) + who.encode() + to.encode() + data)
        if self._keeps:
            self.events.append(Event(at_s, who, what, to))

    @property
    def digest(self) -> str:
        """Digest, equal for equal histories."""
        return self._digest.hexdigest()


def diagram(
    events: Sequence[Event], *, width: int = 11, read: Callable[[str | bytes], str] = str
) -> str:
    """Return a sequence diagram in text: a column for each process, a line for each event.

    Args:
        width: Width of a column.
        read: Formats the content of an event.
    """
    names = list(dict.fromkeys(name for e in events for name in (e.who, e.to) if name))
    column = {name: index for index, name in enumerate(names)}
    lines = [" " * 12 + "".join(name[: width - 1].center(width) for name in names)]
    for event in events:
        row = [" " * (width // 2) + "|" + " " * (width - width // 2 - 1) for _ in names]
        at, to = column[event.who], column.get(event.to)
        text = "".join(row)
        if to is None or to == at:
            text = _put(text, at * width + width // 2, "*")
        else:
            text = _arrow(text, at * width + width // 2, to * width + width // 2)
        lines.append(f"{event.at_s * 1e3:10.3f}  {text} {read(event.what)}")
    return "\n".join(lines)


def _arrow(text: str, start: int, end: int) -> str:
    if start < end:
        return text[: start + 1] + "-" * (end - start - 2) + ">" + text[end:]
    return text[: end + 1] + "<" + "-" * (start - end - 2) + text[start:]


def _put(text: str, at: int, mark: str) -> str:
    return text[:at] + mark + text[at + 1 :]
