"""A question about media, answered by Afferent and by `transformers`: prompt and answer as tokens.

The answer of `transformers` uses only its own code: its chat template, the model's whole processor,
and plain ``generate``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import (
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoTokenizer,
    ProcessorMixin,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from afferent.builtin.engine.model.embeddings import PlacedItem
from afferent.builtin.engine.model.runner import Runner, load_model
from afferent.builtin.pipeline.prompt import PromptBuilder
from afferent.builtin.pipeline.request import Message, TextPart
from afferent.items.request import MediaPart
from afferent.media.decoded import DecodedAudio, DecodedImage, Media
from afferent.media.families.family import read_json
from afferent.media.families.measure import measure
from afferent.media.families.registry import POSITION_FEATURES, describe
from afferent.schedule.step import Chunk
from afferent.types import Modality, Sampling
from tests.models import make_features

NUM_TOKENS = 12
QUESTION = "What is in the picture?"


@dataclass(frozen=True, slots=True)
class Answer:
    prompt: list[int]
    tokens: list[int]


def ours(folder: Path, media: Sequence[Media]) -> Answer:
    """Answer as a server does, in one process."""
    family = describe(folder) or measure(folder)
    kind = Modality.AUDIO if isinstance(media[0], DecodedAudio) else Modality.IMAGE
    written = [family.plan_exactly(item.header).prompt for item in media]
    parts = [part for _ in media for part in (MediaPart(kind, ""), TextPart(QUESTION))]
    prompt = PromptBuilder(folder, family).build([Message("user", tuple(parts))], written)
    runner = Runner(folder, family)
    items, embeddings = [], {}
    for number, (placeholder, item) in enumerate(zip(prompt.placeholders, media, strict=True)):
        features, key = make_features(family, item), number.to_bytes(32)
        grids = {name: each for name, each in features.items() if name in POSITION_FEATURES}
        items.append(PlacedItem(kind, placeholder, key, grids))
        embeddings[key] = runner.encode(kind, features)
    runner.begin("one", prompt.token_ids, items, Sampling(max_tokens=NUM_TOKENS))
    chunk = Chunk("one", 0, len(prompt.token_ids), samples=True)
    chosen = runner.run([chunk], [], embeddings)
    while len(chosen) < NUM_TOKENS:
        chosen += runner.run([], ["one"], {})
    return Answer(prompt.token_ids, [each.token_id for each in chosen])


def theirs(folder: Path, media: Sequence[Media]) -> Answer:
    """Answer with `transformers`."""
    model = load_model(folder)
    with torch.inference_mode():
        is_audio = isinstance(media[0], DecodedAudio)
        made = _audio_inputs(folder, model, media) if is_audio else _image_inputs(folder, media)
        out = model.generate(
            **made,
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            suppress_tokens=None,
            eos_token_id=None,
        )
    prompt = made["input_ids"][0].tolist()
    return Answer(prompt, out[0, len(prompt) :].tolist())


def _image_inputs(folder: Path, media: Sequence[Any]) -> dict[str, Any]:
    processor = processor_of(folder)
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}] * len(media)
    text = processor.tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    images = [Image.fromarray(item.pixels) for item in media]
    # The text from the template is complete.
    given = {"text": text, "images": images, "add_special_tokens": False}
    made = processor(**given, return_tensors="np")
    return {name: torch.from_numpy(value) for name, value in made.items()}


def processor_of(folder: Path) -> Any:
    """Return the model's whole processor, without its part for videos, which needs torchvision.

    With torchvision, `AutoProcessor` returns the same.
    """
    path = folder / "processor_config.json"
    settings = read_json(path) if path.exists() else {}
    model_type = read_json(folder / "config.json")["model_type"]
    name = settings.pop("processor_class", None) or PROCESSOR_MAPPING_NAMES[model_type]
    # The import of the class alone reports a missing library even if it is not needed.
    (module,) = {each for each in _MODULES if each.replace("_", "") == _module_of(name)}
    with mock.patch.dict(sys.modules, {each: _pretended(each) for each in _NOT_NEEDED}):
        file = importlib.import_module(f"transformers.models.{module}.processing_{module}")
    cls = getattr(file, name)
    for part in ("image_processor", "feature_extractor", "video_processor"):
        settings.pop(part, None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts: dict[str, Any] = {
        "image_processor": AutoImageProcessor.from_pretrained(folder),
        "tokenizer": tokenizer,
        "chat_template": tokenizer.chat_template,
    }
    if "video_processor" in cls.get_attributes():
        parts["video_processor"] = None
    with mock.patch.object(ProcessorMixin, "check_argument_for_proper_class"):
        return cls(**parts, **settings)


_NOT_NEEDED = [
    name
    for name in (
        "num2words",
        "num2words.currency",
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
    )
    if find_spec(name.partition(".")[0]) is None
]
"""Modules that the processors import for videos."""


def _pretended(name: str) -> Any:
    module = mock.MagicMock()
    module.__spec__ = ModuleSpec(name, None)
    return module


_MODULES = [path.name for path in (Path(transformers.__file__).parent / "models").iterdir()]


def _module_of(class_name: str) -> str:
    """Return the module's name without underscores: `transformers` has no rule where they stand."""
    return class_name.removesuffix("Processor").replace("_", "").lower()


def _audio_inputs(folder: Path, model: Any, media: Sequence[Any]) -> dict[str, Any]:
    """Return the inputs of Voxtral without its processor, which needs Mistral's tokenizer library.

    The prompt has as many tokens as the model makes embeddings.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    extract = AutoFeatureExtractor.from_pretrained(folder)
    made = [extract(each.samples, sampling_rate=16_000, return_tensors="pt") for each in media]
    features = torch.cat([each.input_features for each in made])
    rows = model.get_audio_features(features, return_dict=True).pooler_output
    content = [{"type": "audio"}, {"type": "text", "text": QUESTION}] * len(media)
    marker = tokenizer.convert_ids_to_tokens(model.config.audio_token_id)
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    text = text.replace(marker, marker * (len(rows.flatten(0, -2)) // len(media)))
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    return {**ids, "input_features": features}


def pictures(seed: int, count: int = 2) -> list[Media]:
    rng = np.random.default_rng(seed)
    sizes = [(120, 90), (64, 100), (210, 70)][:count]
    return [
        DecodedImage(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for width, height in sizes
    ]


def clip(seed: int) -> list[Media]:
    samples = np.random.default_rng(seed).normal(0, 0.1, 20_000).astype(np.float32)
    return [DecodedAudio(samples, 16_000)]
