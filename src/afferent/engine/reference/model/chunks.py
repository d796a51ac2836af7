"""A sequence that the runner computes, the chunk of it in a step, and who computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from afferent.engine.reference.model.embeddings import Embeddings, PlacedItem
from afferent.engine.reference.model.logit_rules import LogitRules
from afferent.types import Sampling


@dataclass(slots=True, eq=False)
class RunningSequence:
    """``state`` is the decoder's own: what it has computed of the sequence, and what it needs to
    compute more.
    """

    sequence_id: str
    token_ids: list[int]
    sampling: Sampling
    state: Any
    rules: LogitRules | None = None
    num_computed: int = 0

    def choose(self, token_id: int) -> None:
        """This is its next token."""
        self.token_ids.append(token_id)
        if self.rules is not None:
            self.rules.add(token_id)


@dataclass(frozen=True, slots=True)
class SequenceChunk:
    """The positions ``[start, end)`` of a sequence; with ``samples``, the next token is chosen."""

    sequence: RunningSequence
    start: int
    end: int
    samples: bool


class Decoder(Protocol):
    """The half of a model that chooses tokens."""

    @property
    def can_split_items(self) -> bool:
        """Whether a chunk of prompt may end inside an item."""

    @property
    def num_embed_layers(self) -> int:
        """How many rows of embeddings there are for a position: `Embeddings.layers`, plus one."""

    def begin(self, token_ids: Sequence[int], items: Sequence[PlacedItem]) -> Any:
        """The state of a new sequence; nothing is computed.

        Raises:
            InvalidPlaceholders: Items overlap, or are not in prompt order.
            InternalError: An item does not fit the prompt.
        """

    def check(self, chunk: SequenceChunk, embeddings: Mapping[bytes, Embeddings]) -> None:
        """
        Raises:
            UnusableEmbeddings: They are not there, or don't fill their placeholder.
        """

    def logits(
        self, chunks: Sequence[SequenceChunk], embeddings: Mapping[bytes, Embeddings]
    ) -> torch.Tensor:
        """Compute the chunks; ``(number of chunks that sample, vocabulary)``."""
