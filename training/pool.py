"""A growing pool of processed images on disk, made by worker processes during the training.

Images go through a real file format and the real image processor, so that training and serving see
the same features.
"""

from __future__ import annotations

import io
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from afferent.conformance.images import DrawnImage, draw_image
from dialogue import Label

CHUNK = 400


@dataclass(frozen=True, slots=True)
class Processed:
    """One image: ``(num_patches, 3, patch, patch)`` uint8 patches, its grid and its label."""

    patches: NDArray[np.uint8]
    grid_thw: tuple[int, int, int]
    label: Label


def through_file(image: DrawnImage, rng: random.Random) -> Image.Image:
    """Return the image after it was written to a JPEG or PNG file and read back."""
    jpeg = rng.random() < 0.6
    data = image.encode("JPEG" if jpeg else "PNG", quality=rng.randrange(40, 97))
    return Image.open(io.BytesIO(data)).convert("RGB")


def _draw(rng: random.Random, np_rng: np.random.Generator) -> DrawnImage:
    """Draw an image; a third are long and narrow, since small shapes in these are hard to learn."""
    if rng.random() > 0.35:
        max_side = 400 if rng.random() < 0.5 else 1000
        return draw_image(np_rng, split="train", max_side=max_side)
    while True:
        image = draw_image(np_rng, split="train")
        short, long = sorted(image.image.size)
        if long >= 3 * short:
            return image


def make_chunk(path: Path, *, seed: int) -> None:
    rng, np_rng = random.Random(seed), np.random.default_rng(seed)
    processor = Qwen2VLImageProcessorPil.from_pretrained(path.parent)
    patches, grids, labels = [], [], []
    for _ in range(CHUNK):
        image = _draw(rng, np_rng)
        out = processor(
            through_file(image, rng), do_rescale=False, do_normalize=False, return_tensors="np"
        )
        grid = out["image_grid_thw"][0]
        side = processor.patch_size
        pixels = out["pixel_values"].reshape(-1, 3, processor.temporal_patch_size, side, side)
        patches.append(pixels[:, :, 0].astype(np.uint8))
        grids.append(grid)
        labels.append((image.colour, image.shape))
    draft = path.with_suffix(".tmp.npz")
    np.savez(draft, patches=np.concatenate(patches), grids=np.stack(grids), labels=labels)
    draft.rename(path)


class Pool:
    """The images of all chunks that were read; `refresh` reads new chunks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: set[Path] = set()
        self.images: list[Processed] = []

    def refresh(self) -> None:
        for path in sorted(set(self._folder.glob("chunk-*.npz")) - self._read):
            if ".tmp" in path.name:
                continue
            self._read.add(path)
            with np.load(path) as chunk:
                patches, grids, labels = chunk["patches"], chunk["grids"], chunk["labels"]
            start = 0
            for grid, (colour, shape) in zip(grids, labels, strict=True):
                end = start + int(grid.prod())
                self.images.append(
                    Processed(
                        patches[start:end],
                        (int(grid[0]), int(grid[1]), int(grid[2])),
                        Label(colour=str(colour), shape=str(shape)),
                    )
                )
                start = end


if __name__ == "__main__":
    folder, worker, num_workers, num_chunks = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    for index in range(worker, num_chunks, num_workers):
        target = folder / f"chunk-{index:04d}.npz"
        if not target.exists():
            make_chunk(target, seed=index)
