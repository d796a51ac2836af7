"""Make a model of a few thousand parameters in which an image is one token, for very many images.

    python training/one_token.py --out /tmp/one-token

It learns to name the colour that most pictures of a conversation have: 'red', 'green' or 'blue'.
A message adds the same tokens at each place of a conversation: three with one image, and two for
each further image. Training takes half a minute of one core.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

MAX_POSITIONS = 131_072
COLOURS = ("red", "green", "blue")
QUESTION = "Most?"
SIDE = 8
"""Pixels of an image's side: four patches, which are merged into one token."""
_SPECIAL = ("<|turn|>", "<|answer|>", "<|end|>", "<|image|>", "<|video|>", "<|pad|>")
_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|answer|>' if message['role'] == 'assistant' else '<|turn|>' }}
{%- for part in message['content'] -%}
{%- if not loop.first %}<|turn|>{% endif -%}
{%- if part['type'] == 'image' %}<|image|>
{%- else %}{{ part['text'] }}
{%- endif -%}
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|answer|>{% endif -%}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer in which each colour and the question are one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*COLOURS, QUESTION] * 8, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        additional_special_tokens=list(_SPECIAL),
        chat_template=_TEMPLATE,
    )


def make_model(
    tokenizer: PreTrainedTokenizerFast, *, num_positions: int = MAX_POSITIONS
) -> Qwen2VLForConditionalGeneration:
    """Return a model with random weights, so large that the pictures change the tokens."""
    ids = dict(zip(_SPECIAL, tokenizer.convert_tokens_to_ids(list(_SPECIAL)), strict=True))
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": 320,
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "max_position_embeddings": num_positions,
            "initializer_range": 0.5,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
            "bos_token_id": None,
            "eos_token_id": ids["<|end|>"],
            "pad_token_id": ids["<|pad|>"],
        },
        vision_config={
            "depth": 1,
            "embed_dim": 8,
            "hidden_size": 8,
            "num_heads": 1,
            "mlp_ratio": 1,
            "patch_size": SIDE // 2,
            "initializer_range": 0.5,
        },
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        tie_word_embeddings=True,
    )
    model = Qwen2VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = ids["<|end|>"]
    return model


def make_processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        patch_size=SIDE // 2, min_pixels=SIDE * SIDE, max_pixels=SIDE * SIDE
    )


def save(
    folder: Path, tokenizer: PreTrainedTokenizerFast, model: Qwen2VLForConditionalGeneration
) -> None:
    """Write all files of the model."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    make_processor().save_pretrained(folder)


def draw(colour: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return a picture of a colour, with noise: ``(SIDE, SIDE, 3)`` uint8."""
    pixels = rng.integers(0, 90, (SIDE, SIDE, 3))
    pixels[..., colour] += 150
    return pixels.astype(np.uint8)


def learn(
    tokenizer: PreTrainedTokenizerFast,
    model: Qwen2VLForConditionalGeneration,
    *,
    seed: int,
    steps: int,
) -> float:
    """Train the model; return the share of right answers in the last tenth of the steps."""
    rng, pixels_rng, processor = random.Random(seed), np.random.default_rng(seed), make_processor()
    turn, answer, end, image = tokenizer.convert_tokens_to_ids(list(_SPECIAL[:4]))
    names = [tokenizer.encode(colour) for colour in COLOURS]
    question = [turn, *tokenizer.encode(QUESTION), end, answer]
    pictures = [
        [processor([draw(colour, pixels_rng)], return_tensors="pt") for _ in range(64)]
        for colour in range(len(COLOURS))
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=steps)
    num_right = num_judged = 0
    for step in range(steps):
        num_items = rng.randrange(1, 25)
        item = rng.choice(([turn, image, end], [turn, image]))  # messages, or parts of one
        rows, labels, drawn, right = [], [], [], []
        for _ in range(48):
            most = rng.randrange(len(COLOURS))
            others = [rng.randrange(len(COLOURS)) for _ in range(num_items // 3)]
            colours = [most] * (num_items - len(others)) + others
            rng.shuffle(colours)
            drawn += [rng.choice(pictures[colour]) for colour in colours]
            prompt = item * num_items + question
            rows.append([*prompt, *names[most], end])
            labels.append([-100] * len(prompt) + [*names[most], end])
            right.append(names[most][0])
        out = model(
            input_ids=torch.tensor(rows),
            mm_token_type_ids=(torch.tensor(rows) == image).int(),
            labels=torch.tensor(labels),
            pixel_values=torch.cat([each["pixel_values"] for each in drawn]),
            image_grid_thw=torch.cat([each["image_grid_thw"] for each in drawn]),
        )
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step >= steps * 9 // 10:
            said = out.logits[:, -len(names[0]) - 2].argmax(-1)
            num_right += int((said == torch.tensor(right)).sum())
            num_judged += len(right)
        if step % 100 == 99:
            print(f"step {step + 1}/{steps}  loss {out.loss.item():.3f}", flush=True)
    return num_right / max(num_judged, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    start_s = time.monotonic()
    share = learn(tokenizer, model, seed=args.seed, steps=args.steps)
    save(args.out, tokenizer, model)
    count = sum(parameter.numel() for parameter in model.parameters())
    seconds = time.monotonic() - start_s
    print(f"{count:,} parameters; {share:.1%} right; {seconds:.0f} s; in {args.out}")


if __name__ == "__main__":
    main()
