"""Ray Data with `afferent.ray.FeatureMapper`; features stay in the store of the node."""

import logging
from collections.abc import Sequence

import ray

from afferent.ray import FeatureMapper, NodeStores


def main(model: str, paths: Sequence[str]) -> int:
    ray.init(num_cpus=4, logging_level=logging.ERROR, log_to_driver=False)
    stores = NodeStores(model, num_workers=2)
    made = ray.data.from_items([{"path": path} for path in paths]).map_batches(
        FeatureMapper,
        fn_constructor_args=(stores,),
        fn_constructor_kwargs={"column": "path", "share": True},
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=1,
        batch_size=32,
    )
    return sum(row["error"] is None for row in made.iter_rows())
