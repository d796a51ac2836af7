"""Ray Data, whose actors run the model's own processor; the program gets its arrays."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from PIL import Image
from transformers import AutoImageProcessor


class Processed:
    def __init__(self, model: str) -> None:
        self._processor = AutoImageProcessor.from_pretrained(model)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        images = [Image.open(path) for path in batch["path"]]
        made = self._processor(images=images, return_tensors="np")
        grids = made["image_grid_thw"]
        ends = np.cumsum(grids.prod(axis=1))[:-1]
        pixels = np.empty(len(images), object)
        pixels[:] = np.split(made["pixel_values"], ends)
        return {"pixel_values": pixels, "image_grid_thw": grids}


def main(model: str, paths: Sequence[str]) -> int:
    ray.init(num_cpus=2, logging_level=logging.ERROR, log_to_driver=False)
    made = ray.data.from_items([{"path": path} for path in paths]).map_batches(
        Processed,
        fn_constructor_args=(model,),
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=1,
        batch_size=32,
    )
    return sum(len(row["pixel_values"]) for row in made.iter_rows())
