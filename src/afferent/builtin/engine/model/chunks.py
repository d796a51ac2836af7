"""Running sequence, its chunk in a step, and the interface of decoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from afferent.builtin.engine.model.embeddings import Embeddings, PlacedItem
from afferent.builtin.engine.model.logit_rules import LogitRules
from afferent.types import Sampling


@dataclass(slots=True, eq=False)
class RunningSequence:
    """Sequence that is computed; ``state`` is the decoder's own: results so far, and inputs for the
    rest.
    """

    sequence_id: str
    token_ids: list[int]
    sampling: Sampling
    state: Any
    rules: LogitRules | None = None
    has_answer: bool = True
    num_computed: int = 0

    def choose(self, token_id: int) -> None:
        """Append its next token."""
        self.token_ids.append(token_id)
        if self.rules is not None:
            self.rules.add(token_id)


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """Positions ``[start, end)`` of a sequence; with ``samples``, the next token is chosen."""

    sequence: RunningSequence
    start: int
    end: int
    samples: bool


class Decoder(Protocol):
    """Half of a model that chooses tokens."""

    @property
    def can_split_items(self) -> bool:
        """Whether a chunk of prompt may end inside an item."""

    @property
    def num_embed_layers(self) -> int:
        """Rows of embeddings for a position: the number of `Embeddings.layers`, plus one."""

    def begin(self, token_ids: Sequence[int], items: Sequence[PlacedItem]) -> Any:
        """Return the state of a new sequence; nothing is computed.

        Raises:
            InvalidPlaceholders: Items overlap, or are not in prompt order.
            InternalError: An item does not fit the prompt.
        """

    def reuse(self, state: Any, source: Any, *, num_tokens: int, is_move: bool) -> None:
        """Give a new sequence the first ``num_tokens`` computed positions of another one.

        Args:
            is_move: Whether the source is not used any more.

        Raises:
            InternalError: The model's positions can't be reused.
        """

    @property
    def can_extend(self) -> bool:
        """Whether a sequence takes further input."""

    def extend(
        self, state: Any, num_tokens: int, token_ids: Sequence[int], items: Sequence[PlacedItem]
    ) -> None:
        """Append input to the state of a sequence; nothing is computed.

        Args:
            num_tokens: Number of tokens that the sequence has.
            token_ids: The input.
            items: Their placeholders count from the input's first token.

        Raises:
            InvalidPlaceholders: Items overlap, or are not in prompt order.
            InternalError: An item does not fit the input, or no sequence takes any.
        """

    def check(self, chunk: SequenceChunk, embeddings: Mapping[bytes, Embeddings]) -> None:
        """Check the embeddings of a chunk.

        Raises:
            UnusableEmbeddings: They are missing, or don't fill their placeholder.
        """

    def logits(
        self, chunks: Sequence[SequenceChunk], embeddings: Mapping[bytes, Embeddings]
    ) -> torch.Tensor:
        """Compute the chunks; return ``(number of chunks that sample, vocabulary)``."""
