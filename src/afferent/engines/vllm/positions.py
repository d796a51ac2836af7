"""Check that a reference's positions fit its rows: bad ones can end vLLM's engine core. Pure.

The core computes the positions of tokens from the small features in the reference, without a check.
So the API process checks them, where a wrong reference is the error of one request.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from afferent.engines.references import FeaturesReference
from afferent.errors import FormatError
from afferent.types import Modality

_GRID = "{}_grid_thw"


def check_positions(
    reference: FeaturesReference, position_features: Collection[str], *, merge_size: int
) -> None:
    """Compare a reference's grid with its number of rows.

    Args:
        position_features: Names of the features that the model computes positions from.
        merge_size: Number of patches of a row or column that become one row of embeddings.

    Raises:
        FormatError: They differ, a needed feature is missing, or there is an unexpected one.
    """
    grid_name = _GRID.format(reference.modality)
    for name, value in reference.small.items():
        is_known = name in position_features and (
            name == grid_name or (not name.endswith("_thw") and not isinstance(value, list))
        )
        if not is_known:
            raise FormatError(f"a reference with {name!r}, which this model has no use for there")
    if grid_name not in position_features:
        return
    grid = reference.small.get(grid_name)
    if not isinstance(grid, list) or len(grid) != 3:
        raise FormatError(f"a reference without {grid_name}")
    sides = [side for side in grid if isinstance(side, int) and side > 0]
    if len(sides) != 3 or (reference.modality is Modality.IMAGE and sides[0] != 1):
        raise FormatError(f"a reference whose {grid_name} is no grid")
    frames, height, width = sides
    num_rows = math.prod((frames, height // merge_size, width // merge_size))
    if num_rows != reference.num_embeds:
        raise FormatError(
            f"a reference whose {grid_name} has {num_rows} rows, and its prompt "
            f"{reference.num_embeds}"
        )
