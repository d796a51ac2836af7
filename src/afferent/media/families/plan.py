"""Plan of one item: the tensors of its features, and its prompt. Pure data."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from afferent.store.block import codec
from afferent.types import TensorSpec

Prompt = tuple[int | str, ...]
"""Prompt of an item, such as ``("<img>", 256, "</img>")``.

An integer is a number of embedding rows, a string is text around or between them, which may
contain `NUMBER`.
"""

NUMBER: Final = "\0"
"""Stands in a text for the item's number among those of its modality in a request, from 0."""


def numbered(prompt: Prompt, number: int) -> Prompt:
    """Return the prompt of the item with this number in its request."""
    return tuple(
        piece.replace(NUMBER, str(number)) if isinstance(piece, str) else piece for piece in prompt
    )


class FeaturePlan(Struct, frozen=True, forbid_unknown_fields=True):
    """Plan of an item's features and prompt.

    It is exact for an image, from its header alone. For a video or an audio clip it is an upper
    bound, until the packets are counted or the clip is decoded.

    Attributes:
        specs: The features by name.
        prompt: Prompt of the item.
    """

    specs: dict[str, TensorSpec]
    prompt: Prompt

    @property
    def num_embeds(self) -> int:
        """Rows of the encoder's output."""
        return sum(piece for piece in self.prompt if isinstance(piece, int))

    @property
    def tree(self) -> dict[str, codec.Tree]:
        """Content of the features' block; its reader needs no plan."""
        return {**self.specs, "prompt": list(self.prompt)}

    @property
    def nbytes(self) -> int:
        """Size of the features' block in the arena."""
        return codec.plan(self.tree).nbytes
