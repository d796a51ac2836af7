"""A `DataLoader` whose workers run the model's own processor, and send a number for each item."""

from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch.utils.data import DataLoader, Dataset
from transformers import AutoImageProcessor


class Sizes(Dataset[int]):
    def __init__(self, model: str, paths: Sequence[str]) -> None:
        self._processor, self._paths = AutoImageProcessor.from_pretrained(model), paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> int:
        with Image.open(self._paths[index]) as image:
            made: Any = self._processor(images=image, return_tensors="pt")
        return len(made["pixel_values"])


def main(model: str, paths: Sequence[str]) -> int:
    sizes = DataLoader(Sizes(model, paths), batch_size=None, num_workers=2, prefetch_factor=8)
    return sum(size > 0 for size in sizes)
