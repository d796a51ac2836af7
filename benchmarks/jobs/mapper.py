"""Ray Data with `afferent.ray.FeatureMapper`; the program gets compact arrays."""

import logging
from collections.abc import Sequence

import ray

from afferent.ray import FeatureMapper


def main(model: str, paths: Sequence[str]) -> int:
    ray.init(num_cpus=2, logging_level=logging.ERROR, log_to_driver=False)
    made = ray.data.from_items([{"path": path} for path in paths]).map_batches(
        FeatureMapper,
        fn_constructor_args=(model,),
        fn_constructor_kwargs={"column": "path"},
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=1,
        batch_size=32,
    )
    return sum(len(row["pixel_values"]) for row in made.iter_rows())
