"""The tokens of prompts that were written before: the same words often come with other media."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Final

from afferent.serve.flow.request import MediaPart, Message, TemplateOptions
from afferent.types import Modality

_MOST_PROMPTS: Final = 256
_MOST_CHARACTERS: Final = 2_000
_PART_CHARACTERS: Final = 8
"""A message and a part count for at least so many."""

_Words = tuple[str | tuple[Modality], ...]
_Key = tuple[str, bool, bool, tuple[tuple[str, _Words], ...]]

Write = Callable[[Sequence[Message], TemplateOptions], Sequence[int]]
"""A conversation's tokens, each item as its marker."""


class PromptMemory:
    """Short conversations of each tenant, the latest of them: nobody learns from how long a prompt
    takes what another tenant has asked.
    """

    def __init__(self, write: Write) -> None:
        self._write = write
        self._known: dict[_Key, array[int]] = {}

    def tokens(
        self, messages: Sequence[Message], options: TemplateOptions, *, tenant: str
    ) -> Sequence[int]:
        """As ``write`` gives them. Raises: whatever that does."""
        if (key := _key(messages, options, tenant)) is None:
            return self._write(messages, options)
        known = self._known.pop(key, None)
        if known is None:
            known = array("q", self._write(messages, options))
            if len(self._known) >= _MOST_PROMPTS:
                del self._known[next(iter(self._known))]
        self._known[key] = known  # behind all others
        return known


def _key(messages: Sequence[Message], options: TemplateOptions, tenant: str) -> _Key | None:
    """``None`` if it is long, or the template is given more than messages."""
    if options.variables:
        return None
    num_characters, said = 0, []
    for message in messages:
        words = tuple(
            (part.modality,) if isinstance(part, MediaPart) else part.text for part in message.parts
        )
        num_characters += _PART_CHARACTERS * (1 + len(words)) + sum(
            len(each) for each in words if isinstance(each, str)
        )
        if num_characters > _MOST_CHARACTERS:
            return None
        said.append((message.role, words))
    return tenant, options.begins_answer, options.continues_last, tuple(said)
