"""How a step's tokens are divided among prompts: by turns. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from afferent.quota.turns import Turns
from afferent.schedule.sequence import Sequence


@dataclass(slots=True)
class Allotment:
    """Tokens that are kept for sequences which have not been visited yet."""

    tokens: dict[str, int]
    num_tokens: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = sum(self.tokens.values())

    def take(self, sequence_id: str) -> int:
        """What is kept for a sequence, and now no more."""
        number = self.tokens.pop(sequence_id, 0)
        self.num_tokens -= number
        return number


def allot(
    turns: Turns[str],
    running: Mapping[str, Sequence],
    waiting: Mapping[str, Sequence],
    *,
    num_tokens: int,
    num_prefills: int,
    may_begin: Callable[[Sequence, int], bool],
) -> Allotment:
    """Whose turn it is gets all that it can use, then the next one.

    Who could not use its turn in the last step, for want of memory, has none now: those who hold
    the memory may need this one to be done with it.

    Args:
        num_tokens: The step's, for prompts.
        num_prefills: How many sequences may compute a part of their prompts.
        may_begin: Of the first who waits, and how many others begin in this step.
    """
    line = sorted(
        (turns.rank(sequence.id), sequence.id)
        for sequence in running.values()
        if sequence.is_prefilling and not sequence.was_held_up
    )
    line.reverse()
    tokens: dict[str, int] = {}
    begun: list[str] = []
    while num_tokens > 0 and len(tokens) < num_prefills:
        first = turns.first
        if first is not None and not may_begin(waiting[first], len(begun)):
            first = None
        if first is not None and (not line or turns.rank(first) < line[-1][0]):
            turns.begin(first)
            begun.append(first)
            sequence = waiting[first]
        elif line:
            sequence = running[line.pop()[1]]
        else:
            break
        tokens[sequence.id] = min(sequence.prefill_left, num_tokens)
        num_tokens -= tokens[sequence.id]
    for sequence_id in begun:
        turns.put_back(sequence_id)
    return Allotment(tokens)
