"""Positions of tokens for the model's rotary embeddings.

Positions are always passed to the model: its own memory of the last call belongs to the sequence
that ran last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from afferent.builtin.engine.model.filling import FilledItem
from afferent.errors import InternalError
from afferent.types import Modality

_TYPES = {Modality.IMAGE: 1, Modality.VIDEO: 2, Modality.AUDIO: 3}
"""Types of media tokens in `transformers`; text tokens have type 0."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of one sequence from a token on: those of its last input, and the shift of the
    tokens after it.

    A sequence takes further input when all its tokens but the last one are computed, and positions
    of computed tokens are not needed again. So the positions before an input are dropped.

    Attributes:
        first: Index of the first token of ``known``.
        known: ``(num_axes, length)``; no columns where each position equals its index.
        shift: Added to the index of a token behind ``known``.
        num_axes: 3 for models with multimodal rotary embeddings, and 1 for the others.
    """

    first: int
    known: torch.Tensor
    shift: int
    num_axes: int

    def between(self, start: int, end: int) -> torch.Tensor:
        """Return the positions ``[start, end)``: ``(num_axes, end - start)``.

        Raises:
            InternalError: They were dropped.
        """
        if start < self.first:
            raise InternalError("a step computes positions before a sequence's last input")
        known = self.known[:, start - self.first : end - self.first]
        following = max(start, self.first + self.known.shape[1])
        if following >= end:
            return known
        rest = torch.arange(following, end).add_(self.shift).expand(self.num_axes, -1)
        return torch.cat((known, rest), dim=1) if following > start else rest

    def extended(
        self, model: Any, num_tokens: int, token_ids: Sequence[int], items: Sequence[FilledItem]
    ) -> Positions:
        """Return the positions with those of further input. O(the input and the answer before it).

        Args:
            num_tokens: Number of tokens before the input.
            token_ids: The input.
            items: Its items.
        """
        new = positions_of(model, token_ids, items, base=num_tokens)
        if not new.known.shape[1]:
            return self  # text continues by itself
        first = self.first + self.known.shape[1]
        known = torch.cat((self.between(first, num_tokens), new.known + self.shift), dim=1)
        return Positions(first, known, new.shift + self.shift, self.num_axes)


def positions_of(
    model: Any, token_ids: Sequence[int], items: Sequence[FilledItem], *, base: int = 0
) -> Positions:
    """Return the positions of a new sequence, or of input behind tokens without a shift.

    Args:
        model: The model, with its language model's head.
        token_ids: The whole prompt; tokens chosen after it may follow.
        items: The items in prompt order.
        base: Number of tokens before the input.
    """
    num_axes = 3 if hasattr(model.model, "get_rope_index") else 1
    if num_axes == 1 or not items:
        return Positions(base, torch.empty((num_axes, 0), dtype=torch.int64), 0, num_axes)
    types = torch.zeros((1, len(token_ids)), dtype=torch.int32)
    grids: dict[str, list[NDArray[Any]]] = {}
    for filled in items:
        types[0, torch.from_numpy(filled.targets - base)] = _TYPES[filled.item.modality]
        for name, grid in filled.item.grids.items():
            grids.setdefault(name, []).append(grid)
    joined = {name: torch.from_numpy(np.concatenate(parts)) for name, parts in grids.items()}
    input_ids = torch.tensor([token_ids])
    known = model.model.get_rope_index(input_ids, mm_token_type_ids=types, **joined)[0][:, 0]
    # The model's own shift counts on from its largest position, which a long video may have:
    # `generate` counts on from the last token, and so does text within the prompt.
    shift = int(known[:, -1].max()) + 1 - len(token_ids)
    return Positions(base, known + base, shift, num_axes)
