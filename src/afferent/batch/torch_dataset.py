"""Data sets and collation for PyTorch: samples with media become the arguments of a model.

Nothing here imports torch before it is used: a `DataLoader` needs of a data set only its length
and its items.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from afferent.batch.feature_maker import Features
from afferent.batch.item_features import Form, ItemFeatures
from afferent.batch.shared_item import SharedItem
from afferent.batch.workplace import of_extra
from afferent.errors import ConfigError, InvalidRequest, UnsupportedModel
from afferent.media.families.plan import numbered
from afferent.store.block import torch_tensors
from afferent.types import Modality

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from afferent.batch.media_sources import Source

_IGNORED: Final = -100
"""Label of a token that is not learned, as in `transformers`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample of a data set: a text with its media in order.

    Attributes:
        text: Text in which the model's own marker (``Collator.markers``) stands for each item, as a
            chat template writes it.
        media: Items, as for `Features.make`.
    """

    text: str
    media: Sequence[Source] = ()


@dataclass(frozen=True, slots=True)
class PreparedSample:
    """Sample whose media have features, or references to them."""

    text: str
    media: tuple[ItemFeatures | SharedItem, ...]


if TYPE_CHECKING:
    _Dataset = Dataset[PreparedSample]
else:
    _Dataset = object  # torch is imported by the program that has a use for it


class FeatureDataset(_Dataset):
    """Data set for a `DataLoader` of PyTorch, of any start method: samples with features.

    It fits ``DataLoader(dataset, collate_fn=Collator(features))``. An item that can't be used
    raises its error, with its class, in the training process.

    Args:
        features: Its pool or server is shared by all workers of the loader; in this process
            (``where="here"``), each worker makes its own samples.
        samples: Samples, or a function that returns one for an element.
        form: As for `Features.make`.
        share: Pass references instead of tensors; only with a pool or a server.
    """

    def __init__(
        self,
        features: Features,
        samples: Sequence[Any],
        *,
        to_sample: Callable[[Any], Sample] | None = None,
        form: Form = "compact",
        share: bool = False,
    ) -> None:
        if share and (features.address is None or form != "compact"):
            raise ConfigError("share=True needs a pool or a server, and the compact form")
        self._features, self._samples = features, samples
        self._to_sample, self._form, self._share = to_sample, form, share

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> PreparedSample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[PreparedSample]:
        """Return the samples of a batch; a pool's workers make their items at the same time."""
        samples = [self._sample(self._samples[index]) for index in indices]
        sources = [source for sample in samples for source in sample.media]
        made = iter(self._made(sources))
        return [
            PreparedSample(sample.text, tuple(next(made) for _ in sample.media))
            for sample in samples
        ]

    def _sample(self, element: Any) -> Sample:
        sample = element if self._to_sample is None else self._to_sample(element)
        if not isinstance(sample, Sample):
            raise ConfigError(
                f"an element of the data set is a {type(sample).__name__}, and no Sample: give "
                "to_sample, a function that makes one of it"
            )
        return sample

    def _made(self, sources: Sequence[Source]) -> Iterable[ItemFeatures | SharedItem]:
        results: Iterable[Any]
        if self._share:
            results = self._features.share_many(sources)
        else:
            results = self._features.make_many(sources, form=self._form, tensors="torch")
        for result in results:
            if not isinstance(result, ItemFeatures | SharedItem):
                raise result.error
            yield result


class Collator:
    """Collation of prepared samples to the arguments of ``model(**inputs)``, as torch tensors.

    - ``input_ids``, ``attention_mask``: each marker is replaced by the tokens of its item; padded
      on the right.
    - the model's own inputs of media, such as ``pixel_values``: those of all items, one after
      another. If they differ in size, they are padded with zeros, as by the model's own processor.
    - ``mm_token_type_ids`` or ``token_type_ids``, for models that need them.
    - ``labels``, on request: ``input_ids`` without padding and media, which are -100.

    Models whose processor groups the images of a prompt (Idefics3, SmolVLM) take one image in each
    sample.
    """

    def __init__(
        self, features: Features, *, tokenizer: Any = None, with_labels: bool = False
    ) -> None:
        """Create it.

        Args:
            features: Maker of the samples' features.
            tokenizer: The model's tokenizer; ``None``: loaded by `transformers` from its folder.
            with_labels: Whether to add ``labels``.

        Raises:
            ConfigError: `transformers` is not installed.
            UnsupportedModel: The model's prompts have no tokens for media.
        """
        if tokenizer is None:
            tokenizer = of_extra("transformers").AutoTokenizer.from_pretrained(features.folder)
        self._features, self._tokenizer, self._with_labels = features, tokenizer, with_labels
        self._tokens = {
            modality: _Tokens.of(tokenizer, tokens.marker, tokens.embed)
            for modality, tokens in features.media_tokens.items()
        }
        registry = of_extra("afferent.media.families.registry")
        facts = registry.facts_of(features.folder)
        self._see_themselves, self._side_by_side = facts.items_see_themselves, facts.side_by_side

    @property
    def markers(self) -> dict[Modality, str]:
        """Text that stands for an item in a sample, for each modality."""
        return {modality: tokens.marker for modality, tokens in self._tokens.items()}

    def __call__(self, samples: Sequence[PreparedSample]) -> dict[str, Any]:
        """Return the arguments of the model.

        Raises:
            InvalidRequest: A text has not as many markers as its sample has items.
        """
        torch = importlib.import_module("torch")
        media = [[_opened(item) for item in sample.media] for sample in samples]
        texts = [
            self._expanded(sample.text, items) for sample, items in zip(samples, media, strict=True)
        ]
        inputs = dict(
            self._tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        )
        inputs.pop("token_type_ids", None)
        made = [self._inputs(item) for items in media for item in items]
        for name in dict.fromkeys(name for each in made for name in each):
            found = [each[name] for each in made if name in each]
            is_side_by_side = name in self._side_by_side
            inputs[name] = torch.cat(found, -1) if is_side_by_side else _joined(torch, found)
        types = self._types(torch, inputs["input_ids"])
        if self._see_themselves:
            inputs["token_type_ids"] = types
        elif any(name.endswith("_grid_thw") for name in inputs):
            inputs["mm_token_type_ids"] = types
        if self._with_labels:
            ignored = (types != 0) | (inputs["attention_mask"] == 0)
            inputs["labels"] = inputs["input_ids"].masked_fill(ignored, _IGNORED)
        return inputs

    def _inputs(self, item: ItemFeatures) -> dict[str, Any]:
        """Return the model's arguments for an item; those for positions are not the encoder's."""
        made = self._features.model_inputs(item)
        rest = {
            name: torch_tensors.in_torch(each) for name, each in item.items() if name not in made
        }
        return {**made, **rest}

    def _expanded(self, text: str, items: Sequence[ItemFeatures]) -> str:
        """Return a text with the prompts of its items."""
        by_marker = {tokens.marker: tokens for tokens in self._tokens.values()}
        either = "|".join(map(re.escape, by_marker))
        *texts, last = re.split(f"({either})", text)
        if len(texts) != 2 * len(items):
            raise InvalidRequest(
                f"a sample has {len(items)} items, and its text has {len(texts) // 2} markers "
                f"({', '.join(by_marker)})"
            )
        counts: Counter[str] = Counter()
        pieces = []
        for before, marker, item in zip(texts[::2], texts[1::2], items, strict=True):
            pieces += [before, by_marker[marker].written(item, counts[marker])]
            counts[marker] += 1
        return "".join([*pieces, last])

    def _types(self, torch: Any, ids: Any) -> Any:
        """Return 1 for each token of an image or a clip, 2 for those of a video, 0 for others."""
        types = torch.zeros_like(ids)
        for modality, tokens in self._tokens.items():
            types[ids == tokens.embed_id] = 2 if modality is Modality.VIDEO else 1
        return types


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Texts of a modality's tokens, and the id of the one for embeddings."""

    marker: str
    embed: str
    embed_id: int

    @classmethod
    def of(cls, tokenizer: Any, marker_id: int, embed_id: int) -> _Tokens:
        marker = embed = None
        if min(marker_id, embed_id) >= 0:
            marker, embed = tokenizer.convert_ids_to_tokens([marker_id, embed_id])
        if marker is None or embed is None:
            raise UnsupportedModel("the tokens of the model's prompts stand for no media")
        return cls(marker, embed, embed_id)

    def written(self, item: ItemFeatures, number: int) -> str:
        """Return the text of an item's prompt.

        Args:
            number: Number of the item among those of its modality in the sample.
        """
        prompt = numbered(item.prompt, number)
        return "".join(each if isinstance(each, str) else self.embed * each for each in prompt)


def _opened(item: ItemFeatures | SharedItem) -> ItemFeatures:
    return item.features(tensors="torch") if isinstance(item, SharedItem) else item


def _joined(torch: Any, tensors: Sequence[Any]) -> Any:
    """Return tensors one after another, padded with zeros at their ends to one size."""
    rest = tuple(max(sizes) for sizes in zip(*(each.shape[1:] for each in tensors), strict=True))
    if all(tuple(each.shape[1:]) == rest for each in tensors):
        return torch.cat(list(tensors))
    out = tensors[0].new_zeros((sum(len(each) for each in tensors), *rest))
    start = 0
    for each in tensors:
        end = start + len(each)
        out[(slice(start, end), *(slice(side) for side in each.shape[1:]))] = each
        start = end
    return out
