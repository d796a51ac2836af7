"""What the file of a family says of the models that it is for: one `ENTRY` each, plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

F_co = TypeVar("F_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine has to know besides, to run such models. Most families say none of it.

    Attributes:
        position_features: Names of the features that the positions of tokens are made from, such as
            an image's grid: they travel with the prompt, and so must be small. A name means this
            whichever model has it.
        items_see_themselves: The positions of an item attend to each other, later ones included, so
            that an item has to be computed at once.
        sharded_like: For language models without a plan of how to shard them, by their
            ``model_type``: that of one with the same layers that has a plan.
    """

    position_features: frozenset[str] = frozenset()
    items_see_themselves: bool = False
    sharded_like: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Generic[F_co]):
    """
    Attributes:
        model_types: As ``config.json`` has them.
        describe: Called with a model's folder and its ``config.json``; ``None`` if its settings ask
            for what is not done here, and the adapter has to take over.
        engine: What an engine has to know of such models.
    """

    model_types: tuple[str, ...]
    describe: Callable[[Path, Mapping[str, Any]], F_co | None]
    engine: EngineFacts = EngineFacts()
