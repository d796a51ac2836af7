"""Tool calls in the text of an answer, which arrives in pieces."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

import msgspec

from afferent.builtin.pipeline.request import CallDelta, Output, TextDelta

_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)'
)


@dataclass(slots=True)
class CallReader:
    """Separates the calls of one answer from its text; arguments are passed on as they come. Pure.

    The text follows the grammar of a `ToolForm`, but may end anywhere.

    Invariants:
        - ``_pending`` is text that was neither passed on nor understood.
        - Inside arguments, ``_depth`` braces are open.
    """

    index: int
    begin: str
    """Mark before a call, and ``end`` after it, both without whitespace around them."""
    end: str
    num_calls: int = 0
    _state: str = field(default="text")
    _pending: str = ""
    _depth: int = 0
    _is_string: bool = False
    _is_escaped: bool = False

    def feed(self, text: str) -> list[Output]:
        """Return the outputs that are known after ``text`` has arrived."""
        self._pending += text
        found: list[Output] = []
        while self._step(found):
            pass
        return found

    def flush(self) -> list[Output]:
        """Return the withheld text, at the end; the rest of an incomplete call is dropped."""
        rest, self._pending = self._pending, ""
        return [TextDelta(rest, self.index)] if rest and self._state == "text" else []

    def _step(self, found: list[Output]) -> bool:
        """Read one piece of the pending text; return whether there may be another."""
        match self._state:
            case "text":
                return self._text(found)
            case "head":
                return self._head(found)
            case "arguments":
                return self._arguments(found)
        _, mark, rest = self._pending.partition(self.end)
        if mark:
            self._state, self._pending = "text", rest
        return bool(mark)

    def _text(self, found: list[Output]) -> bool:
        before, mark, rest = self._pending.partition(self.begin)
        if not mark:
            held = _overlap(before, self.begin)
            before, rest = before[: len(before) - held], before[len(before) - held :]
        if before.strip() or (before and not mark and not self.num_calls):
            found.append(TextDelta(before, self.index))
        self._pending = rest
        self._state = "head" if mark else "text"
        return bool(mark)

    def _head(self, found: list[Output]) -> bool:
        head = _HEAD.match(self._pending)
        if head is None:
            return False
        name = msgspec.json.decode(head[1], type=str)
        found.append(CallDelta(self.index, self.num_calls, name))
        self.num_calls += 1
        self._pending, self._state = self._pending[head.end() :], "arguments"
        return True

    def _arguments(self, found: list[Output]) -> bool:
        end = next((i for i, c in enumerate(self._pending, 1) if self._closes(c)), None)
        said, self._pending = self._pending[:end], "" if end is None else self._pending[end:]
        if said:
            found.append(CallDelta(self.index, self.num_calls - 1, arguments=said))
        self._state = "arguments" if end is None else "tail"
        return end is not None

    def _closes(self, character: str) -> bool:
        """Take the next character of the arguments; return whether it closes them."""
        if self._is_string:
            self._is_string = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
            return False
        self._is_string = character == '"'
        self._depth += {"{": 1, "}": -1}.get(character, 0)
        return character == "}" and self._depth == 0


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``mark``."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)
