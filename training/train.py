"""Train the built-in model from random weights, on drawn images.

    python training/train.py --out src/afferent/builtin/models/shapes

It takes about two hours on two cores. With the same ``--work`` folder, a second run reuses the
drawn images.
"""

from __future__ import annotations

import argparse
import math
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from afferent.conformance.images import COLOURS, SHAPES
from dialogue import sample_conversation, sample_labels
from pool import Pool, Processed
from tokenizer import train_tokenizer, wrap_tokenizer

MERGED_TOKEN_PIXELS = 28 * 28
MAX_MERGED_TOKENS = 36
_BATCHES_SORTED_AT_ONCE = 8

Row = tuple[list[int], list[int], list[Processed]]  # token ids, labels, images


def make_processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        min_pixels=16 * MERGED_TOKEN_PIXELS, max_pixels=MAX_MERGED_TOKENS * MERGED_TOKEN_PIXELS
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2VLForConditionalGeneration:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.get_vocab()}
    text: dict[str, Any] = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.06,  # with the usual 0.02, so narrow a model learns nothing for long
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [4, 6, 6],
        },
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    config = Qwen2VLConfig(
        text_config=text,
        vision_config={
            "depth": 3,
            "embed_dim": 128,
            "hidden_size": 128,
            "num_heads": 4,
            "mlp_ratio": 3,
            "initializer_range": 0.06,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    return Qwen2VLForConditionalGeneration(config)


class Batches:
    """Training batches of conversations about random images of the pool."""

    def __init__(
        self,
        pool: Pool,
        tokenizer: PreTrainedTokenizerFast,
        processor: Qwen2VLImageProcessorPil,
        rng: random.Random,
    ) -> None:
        self._pool, self._tokenizer, self._rng = pool, tokenizer, rng
        self._image_token: int = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self._answer_start: list[int] = tokenizer.encode("<|im_start|>assistant\n")
        self._answer_end: int = tokenizer.convert_tokens_to_ids("<|im_end|>")
        shape = (1, 3, 1, 1, 1)
        self._mean = torch.tensor(processor.image_mean).view(shape)
        self._std = torch.tensor(processor.image_std).view(shape)
        self._merge = processor.merge_size**2
        self._temporal = processor.temporal_patch_size
        self._ready: list[list[Row]] = []

    def sample(self, size: int) -> dict[str, torch.Tensor]:
        """Return the next batch; rows of similar length share one, which halves the padding."""
        if not self._ready:
            drawn = [self._draw_row() for _ in range(size * _BATCHES_SORTED_AT_ONCE)]
            drawn.sort(key=lambda row: len(row[0]))
            self._ready = [drawn[i : i + size] for i in range(0, len(drawn), size)]
            self._rng.shuffle(self._ready)
        return self._collate(self._ready.pop())

    def _draw_row(self) -> Row:
        images = self._rng.choices(self._pool.images, k=len(sample_labels(self._rng)))
        return *self._encode(images), images

    def _collate(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        images = [image for row in rows for image in row[2]]
        length = max(len(ids) for ids, _, _ in rows)
        pad = self._tokenizer.pad_token_id
        input_ids = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _, _ in rows])
        labels = torch.tensor([lab + [-100] * (length - len(lab)) for _, lab, _ in rows])
        attention = torch.tensor([[1] * len(i) + [0] * (length - len(i)) for i, _, _ in rows])
        batch = {"input_ids": input_ids, "labels": labels, "attention_mask": attention}
        batch["mm_token_type_ids"] = (input_ids == self._image_token).int()
        if images:
            batch["pixel_values"] = self.pixels(images)
            batch["image_grid_thw"] = torch.tensor([each.grid_thw for each in images])
        return batch

    def pixels(self, images: list[Processed]) -> torch.Tensor:
        patches = torch.cat([torch.from_numpy(each.patches) for each in images])
        scaled = (patches.unsqueeze(2).float() / 255.0 - self._mean) / self._std
        return scaled.expand(-1, -1, self._temporal, -1, -1).reshape(len(patches), -1)

    def _encode(self, images: list[Processed]) -> tuple[list[int], list[int]]:
        """Return token ids, and labels for the words of the assistant only."""
        messages = sample_conversation(self._rng, [each.label for each in images])
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        parts = text.split("<|image_pad|>")
        counts = [math.prod(each.grid_thw) // self._merge for each in images] + [0]
        ids: list[int] = []
        for part, count in zip(parts, counts, strict=True):
            ids += self._tokenizer.encode(part) + [self._image_token] * count
        labels = [-100] * len(ids)
        start = self._answer_start
        for i in range(len(ids) - len(start)):
            if ids[i : i + len(start)] == start:
                first = i + len(start)
                last = ids.index(self._answer_end, first)
                labels[first : last + 1] = ids[first : last + 1]
        return ids, labels


def speed_up_patch_embedding(model: Qwen2VLForConditionalGeneration) -> None:
    """Compute the patch embedding as a matrix product; the Conv3d is slow on a CPU."""
    embed = model.model.visual.patch_embed

    def forward(pixels: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(pixels, embed.proj.weight.view(embed.embed_dim, -1))

    embed.forward = forward


def learn(
    loss: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """Update the weights once, with the gradient's norm clipped to 1."""
    loss.backward()
    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    schedule.step()


def warm_up_vision(
    model: Qwen2VLForConditionalGeneration, pool: Pool, batches: Batches, args: argparse.Namespace
) -> None:
    """Train the vision tower before the language model learns to describe images.

    Without this, the tower hardly learns for thousands of steps: a language model without useful
    input guesses by frequency, and its gradient does not help the tower.
    """
    rng = random.Random(args.seed)
    heads = nn.ModuleList([nn.Linear(128, len(COLOURS)), nn.Linear(128, len(SHAPES))])
    where = nn.Linear(128, 1)
    tower = model.model.visual
    parameters = [*tower.parameters(), *heads.parameters(), *where.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.vision_lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.vision_lr, total_steps=args.vision_steps, pct_start=0.1
    )
    started, total, right = time.monotonic(), 0.0, 0.0
    for step in range(1, args.vision_steps + 1):
        images = rng.choices(pool.images, k=args.vision_batch)
        grids = torch.tensor([each.grid_thw for each in images])
        rows = tower(batches.pixels(images), grid_thw=grids).pooler_output
        merged = (grids.prod(-1) // tower.spatial_merge_size**2).tolist()
        pooled = torch.stack(
            [(where(part).softmax(0) * part).sum(0) for part in rows.split(merged)]
        )
        wanted = (
            torch.tensor([COLOURS.index(each.label.colour) for each in images]),
            torch.tensor([SHAPES.index(each.label.shape) for each in images]),
        )
        said = [head(pooled) for head in heads]
        loss = sum(nn.functional.cross_entropy(s, w) for s, w in zip(said, wanted, strict=True))
        learn(loss, optimizer, schedule)
        total += loss.item()
        both = torch.stack([s.argmax(-1) == w for s, w in zip(said, wanted, strict=True)]).all(0)
        right += both.float().mean().item()
        if step % 100 == 0:
            pool.refresh()
            minutes = (time.monotonic() - started) / 60.0
            print(
                f"vision {step:5d}/{args.vision_steps}  loss {total / 100:.4f}  "
                f"right {right / 100:.1%}  {len(pool.images)} images  {minutes:.1f} min",
                flush=True,
            )
            total = right = 0.0


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    processor = make_processor()
    processor.save_pretrained(args.work)
    tokenizer = wrap_tokenizer(train_tokenizer())
    command = [sys.executable, str(Path(__file__).with_name("pool.py")), str(args.work)]
    drawers = [
        subprocess.Popen([*command, str(i), str(args.drawers), str(args.chunks)])
        for i in range(args.drawers)
    ]
    pool = Pool(args.work)
    while len(pool.images) < 2000:
        time.sleep(1.0)
        pool.refresh()
    model = (
        Qwen2VLForConditionalGeneration.from_pretrained(args.start)
        if args.start is not None
        else make_model(tokenizer)
    )
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    speed_up_patch_embedding(model)
    batches = Batches(pool, tokenizer, processor, random.Random(args.seed))
    model.train()
    if args.start is None:
        warm_up_vision(model, pool, batches, args)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, weight_decay=0.05, betas=(0.9, 0.98)
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=args.steps, pct_start=0.06
    )
    started, total = time.monotonic(), 0.0
    for step in range(1, args.steps + 1):
        loss = model(**batches.sample(args.batch), use_cache=False).loss
        learn(loss, optimizer, schedule)
        total += loss.item()
        if step % 100 == 0:
            pool.refresh()
            minutes = (time.monotonic() - started) / 60.0
            print(
                f"step {step:5d}/{args.steps}  loss {total / 100:.4f}  "
                f"{len(pool.images)} images  {minutes:.1f} min",
                flush=True,
            )
            total = 0.0
        if step % 1000 == 0 or step == args.steps:
            save(model, tokenizer, processor, args.out)
    for drawer in drawers:
        drawer.terminate()
        drawer.wait()


def save(
    model: Qwen2VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    processor: Qwen2VLImageProcessorPil,
    out: Path,
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config.max_new_tokens = None
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    processor.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--work", type=Path, default=Path("/tmp/afferent-training"))
    parser.add_argument("--start", type=Path, help="go on from this model, without the warm-up")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--vision-steps", type=int, default=1600)
    parser.add_argument("--vision-batch", type=int, default=48)
    parser.add_argument("--vision-lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--drawers", type=int, default=1, help="processes that draw images")
    parser.add_argument("--chunks", type=int, default=110, help="images to draw, in units of 400")
    parser.add_argument("--seed", type=int, default=0)
    train(parser.parse_args())
