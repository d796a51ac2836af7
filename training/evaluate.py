"""Evaluate a model on images of sizes, positions and backgrounds that are not in its training.

    python training/evaluate.py src/afferent/builtin/models/shapes

Prints the share of exactly right answers. The images go through real files (JPEG and PNG) and the
model's own image processor; decoding is greedy.
"""

from __future__ import annotations

import argparse
import io
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2VLForConditionalGeneration,
)

from afferent.conformance.images import DrawnImage, Split, draw_image
from dialogue import Label, answer_for


class Judge:
    def __init__(self, folder: Path, *, split: Split, seed: int) -> None:
        self._tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(folder)
        self._processor = AutoImageProcessor.from_pretrained(folder)
        self._model: Qwen2VLForConditionalGeneration = AutoModelForImageTextToText.from_pretrained(
            folder
        ).eval()
        self._split: Split = split
        self._rng, self._np_rng = random.Random(seed), np.random.default_rng(seed)

    def draw(self) -> DrawnImage:
        return draw_image(self._np_rng, split=self._split)

    def through_file(self, image: DrawnImage) -> Image.Image:
        format = self._rng.choice(("JPEG", "PNG"))
        data = image.encode(format, quality=self._rng.randrange(60, 96))
        return Image.open(io.BytesIO(data)).convert("RGB")

    @torch.inference_mode()
    def answer(self, images: list[DrawnImage], question: str) -> str:
        content: list[dict[str, Any]] = [{"type": "image"} for _ in images]
        content.append({"type": "text", "text": question})
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        out = self._processor(
            images=[self.through_file(each) for each in images], return_tensors="pt"
        )
        image_token = self._model.config.image_token_id
        ids: list[int] = []
        merged = [int(math.prod(g)) // self._processor.merge_size**2 for g in out["image_grid_thw"]]
        for part, count in zip(text.split("<|image_pad|>"), [*merged, 0], strict=True):
            ids += self._tokenizer.encode(part) + [image_token] * count
        input_ids = torch.tensor([ids])
        generated = self._model.generate(
            input_ids=input_ids,
            mm_token_type_ids=(input_ids == image_token).int(),
            max_new_tokens=64,
            do_sample=False,
            **out,
        )
        return self._tokenizer.decode(generated[0, len(ids) :], skip_special_tokens=True)

    def questions(self, num_images: int) -> Iterator[tuple[list[DrawnImage], str, str, str]]:
        """Yield ``(images, kind of question, question, right answer)`` without end."""
        while True:
            images = [self.draw() for _ in range(num_images)]
            labels = [Label(colour=each.colour, shape=each.shape) for each in images]
            order = list(range(num_images))
            if num_images == 1:
                yield images, "one", "What is in the picture?", str(labels[0])
                continue
            which = self._rng.randrange(num_images)
            yield images, "which", f"What is in picture {which + 1}?", str(labels[which])
            yield images, "all", "Name all pictures.", answer_for(labels, order)
            shuffled = self._rng.sample(order, num_images)
            numbers = ", ".join(str(i + 1) for i in shuffled)
            yield images, "listed", f"Name pictures {numbers}.", answer_for(labels, shuffled)


def items_right(answer: str, expected: str) -> tuple[int, int]:
    """Return the number of images that the answer names correctly, and the number of all."""
    said, wanted = answer.rstrip(".").split(". "), expected.rstrip(".").split(". ")
    pairs = zip(said + [""] * len(wanted), wanted, strict=False)
    return sum(a == b for a, b in pairs), len(wanted)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--split", choices=("held_out", "train"), default="held_out")
    parser.add_argument("--questions", type=int, default=600, help="for each number of images")
    parser.add_argument("--seed", type=int, default=20_260)
    parser.add_argument("--show-errors", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    judge = Judge(args.model, split=args.split, seed=args.seed)
    print(f"{args.model}, {args.split} images, seed {args.seed}")
    print(f"{'images':>8}  {'questions':>9}  {'answers right':>13}  {'images right':>14}  by kind")
    for num_images in range(1, 5):
        right: Counter[str] = Counter()
        asked: Counter[str] = Counter()
        items = total_items = 0
        for _, (images, kind, question, expected) in zip(
            range(args.questions), judge.questions(num_images), strict=False
        ):
            answer = judge.answer(images, question)
            asked[kind] += 1
            right[kind] += answer == expected
            good, count = items_right(answer, expected)
            items, total_items = items + good, total_items + count
            if args.show_errors and answer != expected:
                print(f"    {question!r}: {answer!r}, right: {expected!r}")
        kinds = ", ".join(f"{kind} {right[kind] / asked[kind]:.1%}" for kind in asked)
        print(
            f"{num_images:8d}  {asked.total():9d}  {right.total() / asked.total():13.1%}  "
            f"{items / total_items:14.1%}  {kinds}",
            flush=True,
        )


if __name__ == "__main__":
    main()
