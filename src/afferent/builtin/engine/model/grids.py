"""Position features (grids): the few numbers of an item's features that determine positions.

They travel with the prompt, because a sequence may begin when the features are long gone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from afferent.builtin.engine import messages as m
from afferent.errors import FormatError
from afferent.store.block import codec


def tensors_of(tree: codec.ViewTree) -> dict[str, NDArray[Any]]:
    """Return the tensors of an item's features: a flat dictionary of them, and the item's prompt.

    Raises:
        FormatError: The tree is something else.
    """
    if not isinstance(tree, dict):
        raise FormatError("an item's features are not a dictionary")
    tensors = {name: array for name, array in tree.items() if isinstance(array, np.ndarray)}
    if tree.keys() - tensors.keys() != {"prompt"}:
        raise FormatError("an item's features are not tensors only")
    return tensors


def grids_of(tree: codec.ViewTree, names: Collection[str]) -> dict[str, m.Grid]:
    """Return the grids in an item's features, in the form of messages.

    Args:
        tree: The features.
        names: Names of the features that determine positions.

    Raises:
        FormatError: These are no features.
    """
    found = {name: array for name, array in tensors_of(tree).items() if name in names}
    return {
        name: m.Grid(array.dtype.name, array.shape, array.tobytes())
        for name, array in found.items()
    }


def as_arrays(grids: Mapping[str, m.Grid]) -> dict[str, NDArray[Any]]:
    """Return received grids as arrays in memory of their own."""
    return {
        name: np.frombuffer(grid.data, grid.dtype).reshape(grid.shape).copy()
        for name, grid in grids.items()
    }
