"""Results of `afferent.Features`: plain values that travel between processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from afferent.errors import AfferentError
from afferent.media.families.plan import FeaturePlan, Prompt
from afferent.types import ContentKey

Form = Literal["compact", "hf"]
"""Form of features: as engines take them, or exactly as the model's own processor makes them."""
Producer = Literal["afferent", "transformers"]


class ItemFeatures(dict[str, Any]):
    """Features of one item: arrays or tensors by the model's own names, ``pixel_values`` first.

    It is a dictionary, so that ``model(**features)`` and safetensors take it.

    Attributes:
        prompt: Prompt of the item: numbers of embeddings, and texts around and between them. In a
            text, ``\\0`` stands for the item's number among those of its modality, from 0.
        form: ``"compact"``, or ``"hf"``: exactly as the model's own processor makes them.
        made_by: ``"afferent"``, or ``"transformers"`` if the model's own processor made them.
        key: Content key of the compact features: equal for equal items and settings. ``None`` for
            an item that was not encoded.
    """

    prompt: Prompt
    form: Form
    made_by: Producer
    key: ContentKey | None

    def __init__(
        self,
        tensors: Mapping[str, Any],
        *,
        prompt: Prompt,
        form: Form,
        made_by: Producer,
        key: ContentKey | None,
    ) -> None:
        super().__init__(tensors)
        self.prompt, self.form, self.made_by, self.key = prompt, form, made_by, key

    @property
    def num_embeds(self) -> int:
        """Rows of the encoder's output: the tokens of the item, without the text around them."""
        return FeaturePlan({}, self.prompt).num_embeds

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(int(tensor.nbytes) for tensor in self.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (dict(self), self.prompt, self.form, self.made_by, self.key)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {tuple(each.shape)}" for name, each in self.items())
        return f"<ItemFeatures {self.form}: {shapes}; {self.num_embeds} embeddings>"


def _restored(tensors: dict[str, Any], *values: Any) -> ItemFeatures:
    names = ("prompt", "form", "made_by", "key")
    return ItemFeatures(tensors, **dict(zip(names, values, strict=True)))


@dataclass(frozen=True, slots=True)
class FailedItem:
    """Item of a batch that has no features; the batch goes on.

    Attributes:
        index: Position of the item in the batch.
        source: Path of the file; ``None`` for other sources.
        error: An error of `afferent.errors`.
    """

    index: int
    source: str | None
    error: AfferentError


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a batch.

    Attributes:
        num_done: Items with a result, failed ones included.
        num_failed: Failed items.
        num_total: All items; ``None`` if the batch has no length.
    """

    num_done: int
    num_failed: int
    num_total: int | None
