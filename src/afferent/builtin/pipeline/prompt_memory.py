"""Cache of prompt tokens: the same text often comes with other media."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Final

from afferent.builtin.pipeline.request import CallPart, Message, TemplateOptions, TextPart
from afferent.items.request import MediaPart
from afferent.types import Modality

_MOST_PROMPTS: Final = 256
_MOST_CHARACTERS: Final = 2_000
_PART_CHARACTERS: Final = 8
"""Minimum cost of a message or part, in characters."""

_Words = tuple[str | tuple[Modality], ...]
_Key = tuple[str, bool, bool, tuple[tuple[str, _Words], ...]]

Write = Callable[[Sequence[Message], TemplateOptions, str], Sequence[int]]
"""Returns the tokens of a tenant's conversation, with a marker for each item."""


class PromptMemory:
    """Least-recently-used cache of short conversations, separate for each tenant.

    So the time of a prompt does not reveal another tenant's requests.

    Invariants:
        - At most `_MOST_PROMPTS` prompts are cached, in order of their last use.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._known: dict[_Key, array[int]] = {}

    def tokens(
        self, messages: Sequence[Message], options: TemplateOptions, *, tenant: str
    ) -> Sequence[int]:
        """Return the tokens from the cache or from ``write``, whose errors propagate."""
        if (key := _key(messages, options, tenant)) is None:
            return self._write(messages, options, tenant)
        known = self._known.pop(key, None)
        if known is None:
            known = array("q", self._write(messages, options, tenant))
            if len(self._known) >= _MOST_PROMPTS:
                del self._known[next(iter(self._known))]
        self._known[key] = known  # the most recently used
        return known


def _key(messages: Sequence[Message], options: TemplateOptions, tenant: str) -> _Key | None:
    """Return the cache key.

    It is ``None`` if the text is long, the template has variables, or a message has further keys or
    tool calls.
    """
    if options.variables or any(message.extra for message in messages):
        return None
    num_characters, said = 0, []
    for message in messages:
        words: list[str | tuple[Modality]] = []
        for part in message.parts:
            match part:
                case TextPart(text):
                    words.append(text)
                case MediaPart(modality):
                    words.append((modality,))
                case CallPart():
                    return None
        num_characters += _PART_CHARACTERS * (1 + len(words)) + sum(
            len(each) for each in words if isinstance(each, str)
        )
        if num_characters > _MOST_CHARACTERS:
            return None
        said.append((message.role, tuple(words)))
    return tenant, options.begins_answer, options.continues_last, tuple(said)
