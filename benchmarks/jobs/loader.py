"""A `DataLoader` whose workers run the model's own processor, and send its tensors."""

from collections.abc import Sequence
from typing import Any

from PIL import Image
from torch.utils.data import DataLoader, Dataset
from transformers import AutoImageProcessor


class Processed(Dataset[Any]):
    def __init__(self, model: str, paths: Sequence[str]) -> None:
        self._processor, self._paths = AutoImageProcessor.from_pretrained(model), paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        with Image.open(self._paths[index]) as image:
            return dict(self._processor(images=image, return_tensors="pt"))


def main(model: str, paths: Sequence[str]) -> int:
    loader = DataLoader(Processed(model, paths), batch_size=None, num_workers=2, prefetch_factor=8)
    return sum(len(made["pixel_values"]) for made in loader)
