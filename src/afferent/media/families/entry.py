"""Family spec: each family's file declares its models in one `ENTRY`, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

F_co = TypeVar("F_co", covariant=True)

EncoderInputs = Callable[[Any, Mapping[str, Any]], dict[str, Any]]
"""Conversion of an item's inputs, from those of a family's `model_inputs` to those of an upstream's
encoder. The arguments are the family and the inputs, torch tensors by name.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts that an engine needs in addition to run such models. Most families need none.

    Attributes:
        position_features: Names of the features that determine the positions of tokens, such as an
            image's grid: they travel with the prompt, and so must be small. A name means this for
            all models.
        items_see_themselves: The positions of an item attend to each other, later ones included, so
            that an item has to be computed at once.
        numbers_items: The prompt of an item contains its number in the request (`plan.NUMBER`).
        side_by_side: Names of features whose arrays are joined along the last axis, and not along
            the first one, if a batch has several items.
        compared_with: Types of models whose answers from these features were compared with those
            of an upstream from the same media, by the upstream's name (``vllm``). Behind that
            upstream, features replace the media of such models. Those of images have the same bits
            as the upstream's own, so that both may have one name in a cache.
        without_videos: Types of models that take images and no videos in an upstream, by its name:
            they get the frames of a video as images.
        encoder_inputs: Functions, by the upstream's name, for models whose encoder takes other
            inputs there than in `transformers`.
        sharded_like: For language models without a sharding plan, by their ``model_type``: the type
            of one with the same layers and a plan.
    """

    position_features: frozenset[str] = frozenset()
    items_see_themselves: bool = False
    numbers_items: bool = False
    side_by_side: frozenset[str] = frozenset()
    sharded_like: Mapping[str, str] = field(default_factory=dict)
    compared_with: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    without_videos: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    encoder_inputs: Mapping[str, EncoderInputs] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Generic[F_co]):
    """Spec of a family.

    Attributes:
        model_types: As in ``config.json``.
        describe: Called with a model's folder and its ``config.json``; ``None`` if its settings are
            not supported here, and the adapter has to take over.
        engine: Facts for an engine that runs such models.
    """

    model_types: tuple[str, ...]
    describe: Callable[[Path, Mapping[str, Any]], F_co | None]
    engine: EngineFacts = EngineFacts()
