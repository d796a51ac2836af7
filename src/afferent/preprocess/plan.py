"""What one item becomes: the tensors of its features, and its place in the prompt. Pure data."""

from __future__ import annotations

from msgspec import Struct

from afferent.store.block import codec
from afferent.types import TensorSpec

Prompt = tuple[int | str, ...]
"""How an item is written in the prompt: an integer is that many rows of embeddings, a string is
text around or between them: ``("<img>", 256, "</img>")``.
"""


class FeaturePlan(Struct, frozen=True, forbid_unknown_fields=True):
    """Of an image exact, from its header alone; of a video or an audio clip an upper bound, until
    it has been walked or decoded.

    Attributes:
        specs: The features by name.
        prompt: How the item is written in the prompt.
    """

    specs: dict[str, TensorSpec]
    prompt: Prompt

    @property
    def num_embeds(self) -> int:
        """Rows of the encoder's output."""
        return sum(piece for piece in self.prompt if isinstance(piece, int))

    @property
    def tree(self) -> dict[str, codec.Tree]:
        """What stands in the features' block; whoever finds it there needs no plan."""
        return {**self.specs, "prompt": list(self.prompt)}

    @property
    def nbytes(self) -> int:
        """Size of the features' block in the arena."""
        return codec.plan(self.tree).nbytes
