"""Features of a data set of Hugging Face: a stage of `datasets.map` with two processes.

python examples/datasets_map.py
"""

from __future__ import annotations

import io
from typing import Any

import datasets
from PIL import Image

from afferent import FailedItem, Features


class AddFeatures:
    """Function for ``map(batched=True)``: the features of the images in a column, and errors."""

    def __init__(self, features: Features, column: str) -> None:
        self.features, self.column = features, column

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        sources = [image["bytes"] or image["path"] for image in batch[self.column]]
        made = list(self.features.make_many(sources))
        return {
            "error": [str(each.error) if isinstance(each, FailedItem) else None for each in made],
            **{
                name: [None if isinstance(each, FailedItem) else each[name] for each in made]
                for name in self.features.plan((64, 64)).specs
            },
        }


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64 + 4 * number), (number, 0, 0)).save(file, "PNG")
    return file.getvalue()


def main() -> None:
    images = [{"bytes": png(number), "path": None} for number in range(40)]
    images[7] = {"bytes": b"no image", "path": None}
    undecoded = datasets.Features({"image": datasets.Image(decode=False)})
    data = datasets.Dataset.from_dict({"image": images}, features=undecoded)
    with Features("shapes") as features:
        made = data.map(
            AddFeatures(features, "image"),
            batched=True,
            batch_size=8,
            num_proc=2,
            features=datasets.Features(
                {
                    **undecoded,
                    "error": datasets.Value("string"),
                    "pixel_values": datasets.Array2D(shape=(None, 588), dtype="uint8"),
                    "image_grid_thw": datasets.Array2D(shape=(None, 3), dtype="int64"),
                }
            ),
        )
    made = made.with_format(
        "numpy", columns=["pixel_values"], output_all_columns=True, dtype="uint8"
    )
    good = [row for row in made if row["error"] is None]
    print(len(good), "of", len(made), "images have features")
    pixels = good[3]["pixel_values"]
    print(pixels.dtype, pixels.shape, "red:", pixels.max())


if __name__ == "__main__":
    main()
