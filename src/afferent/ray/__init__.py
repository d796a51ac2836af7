"""Features in jobs of Ray: a stage of Ray Data, and one store for each node.

Ray schedules, retries and scales; Afferent makes features and shares them in memory. The package
`ray` is imported at the first use of a `NodeStores`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from afferent.lazy import face

__all__ = ["FeatureMapper", "NodeStores"]

if TYPE_CHECKING:
    from afferent.ray.feature_mapper import FeatureMapper
    from afferent.ray.node_stores import NodeStores
else:  # a test compares this table with the imports above
    __getattr__, __dir__ = face(
        globals(),
        homes={
            "afferent.ray.feature_mapper": "FeatureMapper",
            "afferent.ray.node_stores": "NodeStores",
        },
        modules={},
    )
