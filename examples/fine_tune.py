"""Fine-tuning of the built-in model, with a `DataLoader` of four workers that share one pool.

    python examples/fine_tune.py

The model learns words for four colours. The workers of the loader send files to the pool, whose
confined workers decode them; the training process gets the arguments of ``model(**inputs)``.
"""

from __future__ import annotations

import io
import random

import torch
from PIL import Image
from torch.utils.data import DataLoader
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

from afferent import Collator, FeatureDataset, Features, Modality, Sample

COLOURS = {"red": (220, 30, 30), "blue": (40, 60, 220), "green": (40, 180, 60), "white": (250,) * 3}
NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 32, 8, 2


def file_of(colour: tuple[int, ...], rng: random.Random) -> bytes:
    file = io.BytesIO()
    noisy = tuple(max(0, min(255, value + rng.randint(-20, 20))) for value in colour)
    Image.new("RGB", (64 + 4 * rng.randint(0, 8), 64), noisy).save(file, "JPEG")
    return file.getvalue()


def main() -> None:
    rng = random.Random(0)  # noqa: S311 - for data
    torch.manual_seed(0)
    logging.disable_progress_bar()
    with Features("shapes", where="pool", num_workers=2) as features:
        collate = Collator(features, with_labels=True)
        marker = collate.markers[Modality.IMAGE]
        samples = [
            Sample(f"{marker} The colour is {name}.", [file_of(COLOURS[name], rng)])
            for name in rng.choices(list(COLOURS), k=NUM_SAMPLES)
        ]
        loader = DataLoader(
            FeatureDataset(features, samples),
            batch_size=BATCH_SIZE,
            shuffle=True,
            num_workers=4,
            collate_fn=collate,
            persistent_workers=True,
        )
        model = AutoModelForImageTextToText.from_pretrained(features.folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
        losses = []
        for epoch in range(NUM_EPOCHS):
            for inputs in loader:
                loss = model(**inputs).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            print(f"epoch {epoch + 1}: the loss is {losses[-1]:.2f}, from {losses[0]:.2f}")


if __name__ == "__main__":
    main()
