"""Model folders with a configuration and a processor, without weights; and images to process."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPImageProcessorPil,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Glm4vImageProcessorPil,
    GotOcr2ImageProcessorPil,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    SiglipImageProcessorPil,
)

from afferent.conformance.images import draw_image
from afferent.media.decoded import DecodedImage

MIN_SIDE, MAX_SIDE, MAX_ASPECT = 2, 1500, 150
EXTREMES = ((2, 2), (3, 450), (450, 3), (1, 150), (27, 28), (56, 56), (84, 28), (1500, 1100))


def decoded_images(seed: int, count: int) -> Iterator[DecodedImage]:
    """Yield images of odd sizes, most of them small: drawn, noise, or stripes."""
    rng = np.random.default_rng(seed)
    for index in range(count):
        width, height = EXTREMES[index] if index < len(EXTREMES) else draw_size(rng)
        yield DecodedImage(draw_pixels(rng, width, height, index % 3))


def draw_size(rng: np.random.Generator) -> tuple[int, int]:
    area = math.exp(rng.uniform(math.log(60.0), math.log(300_000.0)))
    aspect = math.exp(rng.normal(0.0, 1.0))
    sides = [max(MIN_SIDE, round(math.sqrt(area * each))) for each in (aspect, 1.0 / aspect)]
    shorter = min(sides)
    return tuple(min(side, MAX_SIDE, shorter * MAX_ASPECT) for side in sides)  # type: ignore[return-value]


def draw_pixels(rng: np.random.Generator, width: int, height: int, kind: int) -> NDArray[np.uint8]:
    if kind == 0 and min(width, height) > 8:
        drawn = draw_image(rng, max_side=150).image.resize((width, height))
        return np.array(drawn)
    if kind == 1:
        return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    y, x = np.mgrid[0:height, 0:width]
    stripes = [x * 255 // max(width - 1, 1), y * 255 // max(height - 1, 1), (x * 7 + y) % 256]
    return np.stack(stripes, axis=-1).astype(np.uint8)


def make_qwen(folder: Path, model_type: str = "qwen2_vl", **settings: Any) -> None:
    write_config(folder, model_type=model_type, image_token_id=5, video_token_id=6)
    Qwen2VLImageProcessorPil(**settings).save_pretrained(folder)


def make_glm(folder: Path, model_type: str = "glm4v", **settings: Any) -> None:
    write_config(folder, model_type=model_type, image_token_id=5)
    Glm4vImageProcessorPil(**settings).save_pretrained(folder)


def make_llava(
    folder: Path,
    *,
    num_additional: int = 1,
    strategy: str = "default",
    siglip: bool = False,
    **settings: Any,
) -> None:
    tokenizer = make_tokenizer(image_token="<image>")
    write_config(
        folder, model_type="llava", image_token_index=tokenizer.convert_tokens_to_ids("<image>")
    )
    images = (SiglipImageProcessorPil if siglip else CLIPImageProcessorPil)(**settings)
    LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=num_additional,
    ).save_pretrained(folder)


def make_gemma3(folder: Path, *, image_seq_length: int = 16, **settings: Any) -> None:
    tokenizer = make_tokenizer(
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
        image_token="<image_soft_token>",
    )
    ids = tokenizer.convert_tokens_to_ids
    write_config(
        folder,
        model_type="gemma3",
        boi_token_index=ids("<start_of_image>"),
        eoi_token_index=ids("<end_of_image>"),
        image_token_index=ids("<image_soft_token>"),
        mm_tokens_per_image=image_seq_length,
    )
    Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(**settings),
        tokenizer=tokenizer,
        image_seq_length=image_seq_length,
    ).save_pretrained(folder)


def make_idefics3(folder: Path) -> None:
    """Make an Idefics3, which cuts images: text stands between the runs of embeddings."""
    tokenizer = make_tokenizer(
        image="<image>",
        fake="<fake_token_around_image>",
        whole="<global-img>",
        end="<end_of_utterance>",
    )
    write_config(
        folder, model_type="idefics3", image_token_id=tokenizer.convert_tokens_to_ids("<image>")
    )
    Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(
            size={"longest_edge": 112}, max_image_size={"longest_edge": 56}
        ),
        tokenizer=tokenizer,
        image_seq_len=4,
    ).save_pretrained(folder)


def make_internvl(folder: Path, *, image_seq_length: int = 4, **settings: Any) -> None:
    """Make an InternVL, without its whole processor, which needs torchvision."""
    tokenizer = make_tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>"
    )
    write_config(
        folder,
        model_type="internvl",
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=image_seq_length,
    )
    GotOcr2ImageProcessorPil(**settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_config(folder: Path, **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def make_tokenizer(**tokens: str) -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer with these special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<pad>", *tokens.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["USER: What is in the picture? ASSISTANT:"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=tokens,
    )
