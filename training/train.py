"""Train the built-in model from random weights, on drawn images.

    python training/train.py --out src/afferent/builtin/models/shapes

It takes some hundred minutes on two cores, and about ten minutes on a GPU, which it uses if
there is one. On CPUs, each core has a process with its part of every batch; before each step they
average their gradients. With the same ``--work`` folder, a second run reuses the drawn images.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, multiprocessing, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision

from afferent.conformance.images import COLOURS, SHAPES
from pool import Pool, Processed
from structured import FORCED, FREE, draw_labels, sample
from tokenizer import MAX_POSITIONS, train_tokenizer, wrap_tokenizer

MERGED_TOKEN_PIXELS = 28 * 28
MAX_MERGED_TOKENS = 36
_MAX_PATCHES = 4 * MAX_MERGED_TOKENS
_BATCHES_SORTED_AT_ONCE = 8
_REFRESH_EVERY = 50
_FAR = 0.15
"""Share of conversations with a gap of positions in them, as if a long text stood there."""

Row = tuple[list[int], list[int], int, list[Processed]]  # ids, labels, start of a gap, images
Batch = dict[str, torch.Tensor]


def make_processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        min_pixels=16 * MERGED_TOKEN_PIXELS, max_pixels=MAX_MERGED_TOKENS * MERGED_TOKEN_PIXELS
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2VLForConditionalGeneration:
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.get_vocab()}
    text: dict[str, Any] = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": 128,
        "intermediate_size": 320,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
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
            "mlp_ratio": 2,
            "initializer_range": 0.06,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    return Qwen2VLForConditionalGeneration(config)


class Pictures(IterableDataset[Batch]):
    """Batches of random images of the pool, with their labels, for the vision tower."""

    def __init__(self, folder: Path, size: int, seed: int) -> None:
        self._folder, self._size, self._seed = folder, size, seed

    def __iter__(self) -> Iterator[Batch]:
        rng, pool = _worker_rng(self._seed), Pool(self._folder)
        for number in itertools.count():
            if number % _REFRESH_EVERY == 0:
                pool.refresh()
            images = [turned(each, rng) for each in rng.choices(pool.images, k=self._size)]
            labels = [(COLOURS.index(i.label.colour), SHAPES.index(i.label.shape)) for i in images]
            yield {**_pixels(images), "labels": torch.tensor(labels)}


class Conversations(IterableDataset[Batch]):
    """Batches of conversations about random images of the pool."""

    def __init__(
        self,
        folder: Path,
        size: int,
        seed: int,
        tokenizer: PreTrainedTokenizerFast,
        model: Qwen2VLForConditionalGeneration,
    ) -> None:
        self._folder, self._size, self._seed, self._tokenizer = folder, size, seed, tokenizer
        self._positions = model.model.get_rope_index
        self._image_token: int = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self._merge = model.config.vision_config.spatial_merge_size**2

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches; rows of similar length share one, which halves the padding.

        All processes have long batches at the same time, so that none waits for the others.
        """
        rng, pool = _worker_rng(self._seed), Pool(self._folder)
        order = random.Random(self._seed)
        for _ in itertools.count():
            pool.refresh()
            rows = [self._draw(rng, pool) for _ in range(self._size * _BATCHES_SORTED_AT_ONCE)]
            rows.sort(key=lambda row: len(row[0]))
            batches = [rows[i : i + self._size] for i in range(0, len(rows), self._size)]
            order.shuffle(batches)
            yield from (self._collate(each, rng) for each in batches)

    def _draw(self, rng: random.Random, pool: Pool) -> Row:
        drawn = rng.choices(pool.images, k=len(draw_labels(rng)))
        images = [turned(each, rng) for each in drawn]
        found = sample(rng, [each.label for each in images])
        text = self._tokenizer.apply_chat_template(
            found.messages, tools=found.tools, tokenize=False
        )
        return *self._encode(text, images), images

    def _encode(self, text: str, images: list[Processed]) -> tuple[list[int], list[int], int]:
        """Return token ids, labels, and the place of the first turn after the tools."""
        plain, has_loss = spans_with_loss(text)
        encoded = self._tokenizer(plain, return_offsets_mapping=True)
        counts = iter([math.prod(each.grid_thw) // self._merge for each in images])
        turn = plain.rfind("<|im_start|>user", 0, plain.find("<|im_start|>assistant"))
        ids: list[int] = []
        labels: list[int] = []
        gap = 0
        for token, (start, _) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if start == turn:
                gap = len(ids)
            if token == self._image_token:
                count = next(counts)
                ids += [token] * count
                labels += [-100] * count
            else:
                ids.append(token)
                # A token that begins free ends a value, also if the next key begins in it.
                labels.append(token if has_loss[start] else -100)
        return ids, labels, gap

    def _collate(self, rows: list[Row], rng: random.Random) -> Batch:
        images = [image for row in rows for image in row[3]]
        length = max(len(row[0]) for row in rows)
        pad = self._tokenizer.pad_token_id
        input_ids = torch.tensor([row[0] + [pad] * (length - len(row[0])) for row in rows])
        labels = torch.tensor([row[1] + [-100] * (length - len(row[0])) for row in rows])
        attention = torch.tensor([[1] * len(r[0]) + [0] * (length - len(r[0])) for r in rows])
        batch = {"input_ids": input_ids, "labels": labels, "attention_mask": attention}
        pixels = _pixels(images) if images else {}
        positions, _ = self._positions(
            input_ids,
            (input_ids == self._image_token).int(),
            image_grid_thw=pixels.get("image_grid_thw"),
            attention_mask=attention,
        )
        for index, (_, _, gap, _) in enumerate(rows):
            if rng.random() < _FAR:
                farthest = MAX_POSITIONS - length
                positions[:, index, gap:] += int(math.exp(rng.uniform(0.0, math.log(farthest))))
        return {**batch, **pixels, "position_ids": positions}


def spans_with_loss(text: str) -> tuple[str, list[bool]]:
    """Return a rendered conversation without marks, and which of its characters get a loss."""
    plain: list[str] = []
    has_loss: list[bool] = []
    is_answer = is_forced = False
    for piece in _PIECES.split(text):
        if piece in (FORCED, FREE):
            is_forced = piece == FORCED
            continue
        plain.append(piece)
        has_loss += [is_answer and not is_forced] * len(piece)
        if piece in (_ANSWER, _END):
            is_answer, is_forced = piece == _ANSWER, False
    return "".join(plain), has_loss


_ANSWER, _END = "<|im_start|>assistant\n", "<|im_end|>"
_PIECES = re.compile("(" + "|".join(map(re.escape, (_ANSWER, _END, FORCED, FREE))) + ")")


def turned(image: Processed, rng: random.Random) -> Processed:
    """Return the image mirrored and turned by right angles at random; its answer is the same."""
    _, rows, columns = image.grid_thw
    count, channels, side, _ = image.patches.shape
    grid = image.patches.reshape(rows // 2, columns // 2, 2, 2, channels, side, side)
    grid = grid.transpose(4, 0, 2, 5, 1, 3, 6).reshape(channels, rows * side, columns * side)
    if rng.random() < 0.5:
        grid = grid.transpose(0, 2, 1)
        rows, columns = columns, rows
    grid = grid[:, :: rng.choice((1, -1)), :: rng.choice((1, -1))]
    blocks = grid.reshape(channels, rows // 2, 2, side, columns // 2, 2, side)
    patches = blocks.transpose(1, 4, 2, 5, 0, 3, 6).reshape(count, channels, side, side)
    return Processed(np.ascontiguousarray(patches), (1, rows, columns), image.label)


def _pixels(images: list[Processed]) -> Batch:
    """Return the patches of all images as uint8, and their grids."""
    patches = np.concatenate([each.patches for each in images])
    grids = torch.tensor([each.grid_thw for each in images])
    return {"pixel_values": torch.from_numpy(patches), "image_grid_thw": grids}


def _worker_rng(seed: int) -> random.Random:
    worker = get_worker_info()
    return random.Random(seed + 100_000 * _rank() + 1000 * (worker.id if worker else 0))


def _rank() -> int:
    """Return the number of this process among those that train together."""
    return distributed.get_rank() if distributed.is_initialized() else 0


class Feed:
    """Batches on the model's device, with pixels as the image processor normalizes them.

    ``pixel_values`` are ``(patches, channels * side * side)``: one frame of the two that the image
    processor makes of each image, which are equal.
    """

    def __init__(
        self, data: IterableDataset[Batch], processor: Any, device: torch.device, loaders: int
    ) -> None:
        self._device = device
        shape = (1, 3, 1, 1)
        self._mean = torch.tensor(processor.image_mean, device=device).view(shape)
        self._std = torch.tensor(processor.image_std, device=device).view(shape)
        ahead = 8 if loaders else None
        self._batches = iter(
            DataLoader(data, batch_size=None, num_workers=loaders, prefetch_factor=ahead)
        )

    def next(self) -> Batch:
        batch = {name: each.to(self._device) for name, each in next(self._batches).items()}
        if "pixel_values" in batch:
            scaled = (batch["pixel_values"].float() / 255.0 - self._mean) / self._std
            batch["pixel_values"] = scaled.flatten(1)
        return batch


def speed_up_patch_embedding(model: Qwen2VLForConditionalGeneration) -> None:
    """Compute the patch embedding of one frame as a matrix product; the Conv3d is slow on a CPU.

    The frames of an image are equal, so that the sum of their weights replaces them.
    """
    embed = model.model.visual.patch_embed

    def forward(pixels: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(pixels, embed.proj.weight.sum(2).flatten(1))

    embed.forward = forward


def attend_in_one_call(model: Qwen2VLForConditionalGeneration) -> None:
    """Compute the attention of all images of a batch at once: for a GPU, many calls are slow."""
    heads = model.config.vision_config.num_heads

    def forward(
        attention: Any,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: Any,
        **_: Any,
    ) -> torch.Tensor:
        total, lengths = len(hidden_states), cu_seqlens.diff()
        rows = torch.repeat_interleave(lengths)
        places = rows * _MAX_PATCHES + torch.arange(total, device=rows.device) - cu_seqlens[rows]
        q, k, v = attention.qkv(hidden_states).reshape(total, 3, heads, -1).unbind(1)
        q, k = apply_rotary_pos_emb_vision(q, k, *position_embeddings)
        padded = [
            each.new_zeros(len(lengths) * _MAX_PATCHES, *each.shape[1:])
            .index_copy(0, places, each)
            .view(len(lengths), _MAX_PATCHES, *each.shape[1:])
            .transpose(1, 2)
            for each in (q, k, v)
        ]
        known = torch.arange(_MAX_PATCHES, device=rows.device) < lengths[:, None]
        out = nn.functional.scaled_dot_product_attention(*padded, attn_mask=known[:, None, None])
        out = out.transpose(1, 2).reshape(len(lengths) * _MAX_PATCHES, -1)[places]
        return attention.proj(out)

    for block in model.model.visual.blocks:
        block.attn.forward = functools.partial(forward, block.attn)


def learn(
    loss: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    """Update the weights once, with the mean gradient of all processes, its norm clipped to 1."""
    loss.backward()
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    if distributed.is_initialized():
        average(parameters)
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    schedule.step()


def average(parameters: Iterable[nn.Parameter]) -> None:
    """Replace the gradients by their mean over all processes.

    A process whose batch has no image has no gradient for the vision tower: it counts as zero.
    """
    gradients = []
    for each in parameters:
        if each.grad is None:
            each.grad = torch.zeros_like(each)
        gradients.append(each.grad)
    flat = torch.cat([each.flatten() for each in gradients])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    parts = flat.split([each.numel() for each in gradients])
    for gradient, mean in zip(gradients, parts, strict=True):
        gradient.copy_(mean.view_as(gradient))


def loss_of(model: Qwen2VLForConditionalGeneration, batch: Batch) -> torch.Tensor:
    """Return the mean loss of the tokens that have one; only these get logits."""
    inputs = {name: each for name, each in batch.items() if name != "labels"}
    hidden = model.model(**inputs, use_cache=False).last_hidden_state[:, :-1]
    wanted = batch["labels"][:, 1:]
    has_loss = wanted != -100
    return nn.functional.cross_entropy(model.lm_head(hidden[has_loss]), wanted[has_loss])


def warm_up_vision(
    model: Qwen2VLForConditionalGeneration, feed: Feed, args: argparse.Namespace
) -> None:
    """Train the vision tower before the language model learns to describe images.

    Without this, the tower hardly learns for thousands of steps: a language model without useful
    input guesses by frequency, and its gradient does not help the tower.
    """
    heads = nn.ModuleList([nn.Linear(128, len(COLOURS)), nn.Linear(128, len(SHAPES))])
    where = nn.Linear(128, 1)
    tower = model.model.visual
    for each in (heads, where):
        each.to(model.device)
    parameters = [*tower.parameters(), *heads.parameters(), *where.parameters()]
    optimizer, schedule = _optimizer(parameters, args.vision_lr, args.vision_steps)
    started, total, right = time.monotonic(), 0.0, 0.0
    for step in range(1, args.vision_steps + 1):
        batch = feed.next()
        grids, wanted = batch["image_grid_thw"], batch["labels"].unbind(1)
        rows = tower(batch["pixel_values"], grid_thw=grids).pooler_output
        merged = grids.prod(-1) // tower.spatial_merge_size**2
        image = torch.repeat_interleave(merged)
        weights = where(rows).exp()
        zeros = rows.new_zeros(len(grids), rows.shape[-1] + 1)
        sums = zeros.index_add(0, image, torch.cat([weights, weights * rows], dim=1))
        pooled = sums[:, 1:] / sums[:, :1]
        said = [head(pooled) for head in heads]
        loss = sum(nn.functional.cross_entropy(s, w) for s, w in zip(said, wanted, strict=True))
        learn(loss, optimizer, schedule)
        both = torch.stack([s.argmax(-1) == w for s, w in zip(said, wanted, strict=True)]).all(0)
        total, right = total + loss.detach(), right + both.float().mean()
        if step % 100 == 0 and _rank() == 0:
            minutes = (time.monotonic() - started) / 60.0
            print(
                f"vision {step:5d}/{args.vision_steps}  loss {total / 100:.4f}  "
                f"right {right / 100:.1%}  {minutes:.1f} min",
                flush=True,
            )
            total = right = 0.0


def _optimizer(
    parameters: Iterable[nn.Parameter], rate: float, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(
        parameters, lr=rate, weight_decay=0.05, betas=(0.9, 0.98), fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=rate, total_steps=steps, pct_start=0.06
    )
    return optimizer, schedule


def draw_and_train(args: argparse.Namespace) -> None:
    """Draw images in the background, and train on those that exist, in all processes."""
    args.work.mkdir(parents=True, exist_ok=True)
    make_processor().save_pretrained(args.work)
    command = [sys.executable, str(Path(__file__).with_name("pool.py")), str(args.work)]
    drawers = [
        subprocess.Popen([*command, str(i), str(args.drawers), str(args.chunks)])
        for i in range(args.drawers)
    ]
    try:
        while len(list(args.work.glob("chunk-????.npz"))) < args.first_chunks:
            if any(drawer.poll() for drawer in drawers):
                raise SystemExit("a process that draws images has failed")
            time.sleep(1.0)
        if args.processes == 1:
            train(args)
        else:
            with tempfile.TemporaryDirectory() as folder:
                meeting = (Path(folder) / "processes").as_uri()
                multiprocessing.spawn(
                    train_together, (meeting, args), nprocs=args.processes, daemon=True
                )
    finally:
        for drawer in drawers:
            drawer.terminate()
            drawer.wait()


def train_together(rank: int, meeting: str, args: argparse.Namespace) -> None:
    """Train with this process's part of each batch."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=args.processes
    )
    train(args)
    distributed.destroy_process_group()


def train(args: argparse.Namespace) -> None:
    """Train the model, and write it."""
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    processor, tokenizer = make_processor(), wrap_tokenizer(train_tokenizer())
    model = (
        Qwen2VLForConditionalGeneration.from_pretrained(args.start)
        if args.start is not None
        else make_model(tokenizer)
    )
    if _rank() == 0:
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {device}", flush=True)
    talks = Conversations(args.work, args.batch // args.processes, args.seed, tokenizer, model)
    feed = Feed(talks, processor, device, args.loaders)
    speed_up_patch_embedding(model)
    if device.type == "cuda":
        attend_in_one_call(model)
    model.to(device).train()
    if args.start is None:
        pictures = Pictures(args.work, args.vision_batch // args.processes, args.seed)
        warm_up_vision(model, Feed(pictures, processor, device, args.loaders), args)
    optimizer, schedule = _optimizer(model.parameters(), args.lr, args.steps)
    started, total = time.monotonic(), 0.0
    for step in range(1, args.steps + 1):
        loss = loss_of(model, feed.next())
        learn(loss, optimizer, schedule)
        total += loss.detach()
        if _rank() != 0:
            continue
        if step % 100 == 0:
            minutes = (time.monotonic() - started) / 60.0
            print(
                f"step {step:5d}/{args.steps}  loss {total / 100:.4f}  {minutes:.1f} min",
                flush=True,
            )
            total = 0.0
        if step % 1000 == 0 or step == args.steps:
            save(model, tokenizer, processor, args.out)


def save(
    model: Qwen2VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    processor: Qwen2VLImageProcessorPil,
    out: Path,
) -> None:
    """Write the model; its weights are computed in float32, and kept in float16."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config.max_new_tokens = None
    half = {name: each.detach().half().cpu() for name, each in model.state_dict().items()}
    del half["lm_head.weight"]  # is the embedding's
    model.save_pretrained(out, state_dict=half)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)
    processor.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--work", type=Path, default=Path("/tmp/afferent-training"))
    parser.add_argument("--start", type=Path, help="go on from this model, without the warm-up")
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--vision-steps", type=int, default=3000)
    parser.add_argument("--vision-batch", type=int, default=64)
    parser.add_argument("--vision-lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--drawers", type=int, default=1, help="processes that draw images")
    parser.add_argument("--chunks", type=int, default=120, help="images to draw, in units of 400")
    parser.add_argument("--first-chunks", type=int, default=5, help="of these, before it begins")
    parser.add_argument("--loaders", type=int, default=0, help="processes that make batches")
    parser.add_argument("--processes", type=int, default=0, help="that train; 0: one a core")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # ends its processes, too
    if arguments.processes == 0:
        cores = len(os.sched_getaffinity(0))
        arguments.processes = 1 if torch.cuda.is_available() else min(cores, 8)
    draw_and_train(arguments)
