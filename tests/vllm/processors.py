"""Compare features with the encoder's inputs that vLLM makes itself, in vLLM's own environment.

python -m tests.vllm.processors FOLDER NUMBER
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from vllm.engine.arg_utils import EngineArgs
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs

from afferent.engines.vllm.plugin.features import FeatureReader, kwargs_item
from afferent.errors import InvalidMedia
from afferent.media.decoded import DecodedAudio, DecodedImage, Media
from afferent.media.families import mistral
from afferent.media.families.family import OwnTokenizer
from afferent.media.families.plan import numbered
from afferent.media.families.registry import AnyFamily, describe
from afferent.types import Modality

_SIZES = (
    (2, 2),
    (3, 300),
    (300, 3),
    (27, 28),
    (56, 56),
    (84, 28),
    (57, 56),
    (700, 500),
    (110, 165),
    (300, 100),
)
_RATE_HZ = 16_000
_CAST_BY_ENCODER = {"minicpmv4_6": ("pixel_values",)}
"""Floats that vLLM's processor leaves in float32: the first layer of the encoder casts them."""
_TOLERANCES = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (1e-3, 2**-7)}
"""Absolute and relative tolerance of floats of audio; all else has the same bits."""


class Tower(torch.nn.Module):
    """Model on the CPU; ``input_dtype``: type of the pixels that vLLM's processor makes for it."""

    def __init__(self, input_dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.input_norm = SimpleNamespace(input_dtype=input_dtype)


def media_of(modality: Modality, number: int) -> Iterator[tuple[Media, Any]]:
    """Yield an item, decoded here, and as vLLM decodes it."""
    rng = np.random.default_rng(5)
    for index in range(number):
        if modality is Modality.AUDIO:
            num_samples = int(rng.integers(2_000, 80_000)) if index else 31 * _RATE_HZ
            samples = rng.normal(0, 0.2, num_samples).astype(np.float32)
            yield DecodedAudio(samples, _RATE_HZ), (samples, _RATE_HZ)
            continue
        width, height = _SIZES[index] if index < len(_SIZES) else rng.integers(16, 420, 2).tolist()
        coarse = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height))
        yield DecodedImage(np.array(image)), image


def compare(folder: Path, number: int) -> None:
    family = describe(folder, mistral.config_of(folder), resize_rule="torchvision")
    assert family is not None
    for dtype in ("float32", "bfloat16"):
        model_config = EngineArgs(
            model=str(folder),
            dtype=dtype,
            limit_mm_per_prompt={"image": 4, "audio": 4},
            trust_remote_code=True,
        ).create_model_config()
        processor = MULTIMODAL_REGISTRY.create_processor(model_config)
        for modality in {Modality.IMAGE, Modality.AUDIO} & family.tokens.keys():
            for media, theirs in media_of(modality, number):
                compare_item(modality, family, processor, media, theirs)
            print(f"{number} items of {modality} are equal in {dtype}")


def compare_item(
    modality: Modality, family: AnyFamily, processor: Any, media: Media, theirs: Any
) -> None:
    try:
        plan = family.plan(media.header)
    except InvalidMedia as error:
        print(media.header, error)
        return
    assert plan is not None
    tokens = family.tokens[modality]
    ids: list[int] = []
    for piece in numbered(plan.prompt, 0):
        if isinstance(piece, int):
            ids += [tokens.embed] * piece
        elif isinstance(family, OwnTokenizer):
            ids += family.tokenizer().encode(piece).ids
        else:
            tokenizer = processor.info.get_tokenizer()
            ids += tokenizer.encode(piece, add_special_tokens=False)
    marker = [tokens.marker]
    if isinstance(family, OwnTokenizer):
        marker = ids  # Mistral's own tokenizer has written all of an item's tokens already
    elif tokens.marker_text:
        tokenizer = processor.info.get_tokenizer()
        marker = tokenizer.encode(tokens.marker_text, add_special_tokens=False)
    inputs = ProcessorInputs(
        prompt=marker,
        mm_data_items=processor.info.parse_mm_data({str(modality): theirs}),
    )
    made = processor.apply(inputs, TimingContext(enabled=False))
    (stock,) = made["mm_kwargs"][str(modality)]
    out = {name: np.full(s.shape, 77, np.dtype(s.dtype)) for name, s in plan.specs.items()}
    family.process(media, out)
    tree = {name: torch.from_numpy(array) for name, array in out.items()}
    model_type = processor.info.ctx.model_config.hf_config.model_type
    types = {element.data.dtype for element in stock.values()}
    is_bytes = torch.uint8 in types
    tower = Tower(torch.uint8 if is_bytes else torch.float32)
    reader = FeatureReader(tower, processor.info.ctx.model_config)
    ours = kwargs_item(processor, modality, reader.inputs(modality, tree))
    assert made["prompt_token_ids"] == ids, (made["prompt_token_ids"], ids)
    assert ours.keys() == stock.keys(), (ours.keys(), stock.keys())
    for name, element in stock.items():
        expected, found = element.data, ours[name].data
        assert expected.shape == found.shape, (name, expected.shape, found.shape)
        if found.dtype == torch.bfloat16 and name in _CAST_BY_ENCODER.get(model_type, ()):
            expected = expected.to(found.dtype)
        assert expected.dtype == found.dtype, (name, expected.dtype, found.dtype)
        tolerances = _TOLERANCES if modality is Modality.AUDIO else {}
        atol, rtol = tolerances.get(found.dtype, (0.0, 0.0))
        what = f"{name} of {media.header}"
        torch.testing.assert_close(found, expected, atol=atol, rtol=rtol, msg=what)


if __name__ == "__main__":
    compare(Path(sys.argv[1]), int(sys.argv[2]))
