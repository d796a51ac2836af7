"""Token-budget allocation: divide a step's tokens and encoder rows fairly among prompts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from afferent.admission.turns import Turns
from afferent.schedule.sequence import Sequence


@dataclass(slots=True)
class Allotment:
    """Tokens and rows that are reserved for sequences which the step has not visited yet.

    Invariants: ``num_tokens`` and ``num_rows`` are the sums of ``tokens`` and ``rows``.
    """

    tokens: dict[str, int]
    rows: dict[str, int] = field(default_factory=dict)
    num_tokens: int = 0
    num_rows: int = 0

    def __post_init__(self) -> None:
        self.num_tokens = sum(self.tokens.values())
        self.num_rows = sum(self.rows.values())

    def take(self, sequence_id: str) -> int:
        """Return the tokens reserved for a sequence, and end its reservations."""
        number = self.tokens.pop(sequence_id, 0)
        self.num_tokens -= number
        self.num_rows -= self.rows.pop(sequence_id, 0)
        return number


def allot(
    turns: Turns[str],
    running: Mapping[str, Sequence],
    waiting: Mapping[str, Sequence],
    *,
    num_tokens: int,
    num_prefills: int,
    may_begin: Callable[[Sequence, int], bool],
    encodable: Callable[[Sequence, int, int], tuple[int, int]],
) -> Allotment:
    """Divide the budget of a step in fair order: the first sequence gets all that it can use.

    A running sequence that could not use its tokens in the last step, for lack of memory, gets none
    now: the sequences that use the memory may need these tokens to finish.

    Args:
        num_tokens: The step's tokens for prompts.
        num_prefills: Number of sequences that may compute a part of their prompts.
        may_begin: Takes the first waiting sequence and the number of others that begin in this
            step; returns whether it may begin.
        encodable: Takes a sequence, a number of tokens and the rows reserved already; returns how
            many of these tokens the sequence can compute within the step's encoder rows, and how
            many rows they need.
    """
    line = sorted(
        (turns.rank(sequence.id), sequence.id)
        for sequence in running.values()
        if sequence.is_prefilling and not sequence.was_held_up
    )
    line.reverse()
    tokens: dict[str, int] = {}
    rows: dict[str, int] = {}
    num_rows = 0
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
        most = min(sequence.prefill_left, num_tokens)
        most, needed = encodable(sequence, most, num_rows)
        if most or needed:
            tokens[sequence.id], rows[sequence.id] = most, needed
            num_tokens -= most
            num_rows += needed
    for sequence_id in begun:
        turns.put_back(sequence_id)
    return Allotment(tokens, rows)
