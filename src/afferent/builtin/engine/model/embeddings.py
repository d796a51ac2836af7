"""Embeddings of one item, and an item at its position in a sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from afferent.errors import FormatError
from afferent.store.block import codec, torch_tensors
from afferent.types import Modality, Placeholder

Features = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Output of the encoder for one item.

    Attributes:
        rows: ``(num_embeds, hidden)``, in the order of the positions that they fill. For an
            encoder-decoder model the encoder's whole output, which the decoder attends to.
        layers: Further tensors of the same shape, for models that add embeddings to the states
            after their first layers too (Qwen3-VL's "deepstack").
    """

    rows: torch.Tensor
    layers: tuple[torch.Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.rows, *self.layers))

    def tree(self) -> dict[str, codec.Tree]:
        """Return the tree for the store: in this machine's memory, for any device."""
        return {"rows": self.rows.cpu(), "layers": [layer.cpu() for layer in self.layers]}

    @classmethod
    def from_tree(cls, tree: codec.ViewTree) -> Embeddings:
        """Return embeddings from a tree of `tree`, as `codec.view` returns it, without a copy.

        Raises:
            FormatError: It is no such tree.
        """
        match tree:
            case {"rows": rows, "layers": list(layers), **rest} if not rest:
                return cls(_tensor(rows), tuple(map(_tensor, layers)))
            case _:
                raise FormatError("a block of embeddings holds something else")


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """Item of a sequence.

    Attributes:
        modality: Modality of the item.
        placeholder: The positions it fills; at offset 0, beside the prompt, if the decoder attends
            to its embeddings.
        key: Key of its embeddings.
        grids: The few small arrays of its features that determine positions.
    """

    modality: Modality
    placeholder: Placeholder
    key: bytes
    grids: Features


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, np.ndarray):
        value = torch_tensors.as_tensor(value)
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        raise FormatError("embeddings are matrices")
    return value
