"""Stage of Ray Data: features of the items in a column, or references to them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from afferent.batch.feature_maker import Features
from afferent.batch.item_features import FailedItem
from afferent.batch.item_routes import is_lost
from afferent.batch.shared_item import SharedItem
from afferent.errors import AfferentError, ConfigError, InvalidMedia, StoreFull
from afferent.ray.node_stores import NodeStores
from afferent.types import Modality

_SIDE: Final = 64
"""Side of the image whose plan gives the columns of a batch in which all items failed."""


class FeatureMapper:
    """Class for ``ray.data.Dataset.map_batches``: it adds the features of one column's items.

    A batch keeps its columns, and gets these:

    - ``features``, with ``share=True``: a `SharedItem`, or ``None`` for an item that failed.
    - Otherwise a column for each of the model's inputs, by its own name, such as ``pixel_values``,
      with empty arrays for an item that failed, and ``num_embeds``, the item's tokens.
    - ``error``: the code and message of an item that can't be used; ``None`` for all others.

    ``prefix`` comes before these names.

    An actor of Ray makes the features in its own process, with the CPUs that Ray gives it, or has
    them made by the workers of its node (`NodeStores`), and then needs few CPUs itself. A store
    that stays full, or is gone for longer than its restart takes, ends the batch by an error, which
    is not an item's.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | NodeStores,
        *,
        column: str,
        share: bool = False,
        prefix: str = "",
        modality: Modality | None = None,
        **arguments: Any,
    ) -> None:
        """Create it, in an actor of Ray.

        Args:
            model: Model as for `Features`, in the actor's process; or the stores of all nodes.
            column: Column with the items: paths, bytes of files, or arrays, as for `Features.make`.
            share: Leave the features in the store of the node, and return references. A reference
                pins nothing in a dataset: `Features.open` makes evicted features again.
            prefix: Begin of the names of all columns that are added, such as ``"left_"``.
            modality: As for `Features.make`.
            arguments: As for `Features`, with a model.

        Raises:
            ConfigError: An argument is wrong.
            UnsupportedModel: The model's own processor is needed, and can't be used here.
        """
        if isinstance(model, NodeStores):
            if arguments:
                raise ConfigError(f"NodeStores has its own {', '.join(arguments)}: give them there")
            self._features = model.features()
        else:
            self._features = Features(model, **arguments)
        if share and self._features.address is None:
            raise ConfigError(
                "share=True needs a store: give a NodeStores in the place of the model, or where="
            )
        self._column, self._share, self._prefix = column, share, prefix
        self._modality = modality

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch with the columns of its features.

        Args:
            batch: Columns as arrays, Ray's batch format ``"numpy"``.

        Raises:
            ConfigError: The batch has no such column, or has one that would be added.
            Unavailable: The store is gone, or stays full.
        """
        if self._column not in batch:
            raise ConfigError(
                f"column={self._column!r}: the dataset has {', '.join(map(repr, batch))}"
            )
        results = list(self._results(batch[self._column]))
        errors = [
            f"{each.error.code}: {each.error.message}" if isinstance(each, FailedItem) else None
            for each in results
        ]
        made = self._references(results) if self._share else self._tensors(results)
        added = {f"{self._prefix}{name}": each for name, each in made.items()}
        added[f"{self._prefix}error"] = _column(errors)
        if taken := sorted(added.keys() & batch.keys()):
            raise ConfigError(
                f"the dataset has {', '.join(map(repr, taken))} already, which the features would "
                f"replace: rename it, or give another prefix= (now {self._prefix!r})"
            )
        return {**batch, **added}

    def _results(self, sources: Any) -> Iterator[Any]:
        make = self._features.share_many if self._share else self._features.make_many
        in_flight = max(1, len(sources))
        for each in make(sources, modality=self._modality, in_flight=in_flight):
            if isinstance(each, FailedItem) and not _is_final(each.error):
                raise each.error
            if isinstance(each, SharedItem):
                each.release()  # views of a dead store's arena would keep us from the next store
            yield each

    def _references(self, results: list[Any]) -> dict[str, Any]:
        items = [each if isinstance(each, SharedItem) else None for each in results]
        return {"features": _column(items)}

    def _tensors(self, results: list[Any]) -> dict[str, Any]:
        made = [None if isinstance(each, FailedItem) else each for each in results]
        blank = dict(self._blank)
        for each in made:
            for name, array in (each or {}).items():
                blank.setdefault(name, np.empty((0,) * array.ndim, array.dtype))
        columns = {
            name: _column([empty if each is None else each.get(name, empty) for each in made])
            for name, empty in blank.items()
        }
        num_embeds = [0 if each is None else each.num_embeds for each in made]
        return {**columns, "num_embeds": np.array(num_embeds, np.int64)}

    @cached_property
    def _blank(self) -> dict[str, NDArray[Any]]:
        """Empty arrays with the types of an image's features: all blocks have the same columns."""
        try:
            plan = self._features.plan((_SIDE, _SIDE))
        except InvalidMedia:  # the model takes no images
            return {}
        return {
            name: np.empty((0,) * len(spec.shape), spec.dtype) for name, spec in plan.specs.items()
        }


def _is_final(error: AfferentError) -> bool:
    """Whether an item is to blame for its error, and not a store that is gone or full."""
    return not is_lost(error) and not isinstance(error, StoreFull)


def _column(values: list[Any]) -> NDArray[Any]:
    """Return values as an array of objects, also where all of them are arrays of one shape."""
    column = np.empty(len(values), object)
    for index, value in enumerate(values):
        column[index] = value
    return column
