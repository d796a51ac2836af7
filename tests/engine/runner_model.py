"""One model, run by Afferent and by `transformers`, on media of one kind."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoImageProcessor, GenerationMixin, WhisperFeatureExtractor

from afferent.builtin.engine.model.embeddings import Embeddings, PlacedItem
from afferent.builtin.engine.model.group import Group
from afferent.builtin.engine.model.runner import Runner, load_model
from afferent.builtin.pipeline.prompt import Prompt, PromptBuilder
from afferent.builtin.pipeline.request import Message, TextPart
from afferent.conformance.images import draw_image
from afferent.engines.protocol import Chosen
from afferent.items.request import MediaPart
from afferent.media.decoded import DecodedAudio, DecodedImage, Media
from afferent.media.families.adapter import AdapterFamily
from afferent.media.families.measure import measure
from afferent.media.families.registry import POSITION_FEATURES, describe
from afferent.media.headers.probe import VideoHeader
from afferent.operations.supervisor.checks import BUILT_IN_MODELS
from afferent.schedule.step import Chunk
from afferent.types import Modality, Placeholder, Sampling
from tests.engine import families
from tests.models import make_features, make_llava, make_voxtral

NUM_TOKENS = 12
GREEDY = Sampling(max_tokens=NUM_TOKENS)
SMALLEST_LEAD = 1e-3
"""Smallest difference between the two best logits: with less, rounding could choose."""

_QUESTION = "What is in the picture?"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as the runner gets it, and the answer of `transformers`."""

    prompt: Prompt
    items: list[PlacedItem]
    embeddings: dict[bytes, Embeddings]
    expected: list[int]


class Frames:
    """A decoded video."""

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        self._pixels = pixels
        count, height, width, _ = pixels.shape
        self.header = VideoHeader(width, height, count, 2.0)

    def frames(self, indices: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        yield from self._pixels[list(indices)]


class Model:
    """A model in Afferent's ``runner``, and the same in `transformers` as the ``reference``."""

    def __init__(
        self,
        folder: Path,
        kind: Modality,
        *,
        is_reference: bool = True,
        seed: int = 0,
        group: Group | None = None,
    ) -> None:
        self.family = describe(folder, reference=is_reference) or measure(folder)
        self.folder, self.kind, self.seed = folder, kind, seed
        self.prompts = PromptBuilder(folder, self.family)
        self.runner = Runner(folder, self.family, group=group)
        self.reference = load_model(folder)
        self.reference.generation_config.eos_token_id = None
        self._num_keys = 0

    # Media and prompts

    def draw(self, rng: np.random.Generator) -> Media:
        match self.kind:
            case Modality.IMAGE:
                return DecodedImage(np.array(draw_image(rng, max_side=300).image))
            case Modality.AUDIO:
                samples = rng.normal(0, 0.1, int(rng.integers(8_000, 24_000)))
                return DecodedAudio(samples.astype(np.float32), 16_000)
            case Modality.VIDEO:
                shape = (int(rng.integers(2, 9)), 90, 120, 3)
                return Frames(rng.integers(0, 256, shape).astype(np.uint8))

    def features(self, media: Media) -> dict[str, Any]:
        return make_features(self.family, media)

    def inputs(self, num_items: int, rng: np.random.Generator) -> tuple[Prompt, list[Media]]:
        """Return a prompt of random length, with its items in the middle, and the media."""
        media = [self.draw(rng) for _ in range(num_items)]
        before = TextPart("So. " * int(rng.integers(1, 8)))
        items = [MediaPart(self.kind, "") for _ in media]
        parts: tuple[MediaPart | TextPart, ...] = (before, *items, TextPart(_QUESTION))
        message = Message("user", parts)
        if self.runner.info.cross_attention:  # the prompt has no positions for the item
            text = self.prompts.build([Message("user", (before, TextPart(_QUESTION)))], [])
            num_embeds = self.reference.config.max_source_positions
            places = [Placeholder(0, num_embeds) for _ in media]
            return Prompt(text.token_ids, places, places), media
        written = [self.family.plan_exactly(item.header).prompt for item in media]
        return self.prompts.build([message], written), media

    def prepare(self, num_items: int, rng: np.random.Generator) -> Prepared:
        prompt, media = self.inputs(num_items, rng)
        items, embeddings = self.place(prompt.placeholders, media)
        return Prepared(prompt, items, embeddings, self.generate(prompt, media))

    def place(
        self, placeholders: list[Placeholder], media: list[Media]
    ) -> tuple[list[PlacedItem], dict[bytes, Embeddings]]:
        placed, made = [], {}
        for placeholder, item in zip(placeholders, media, strict=True):
            features, key = self.features(item), self._num_keys.to_bytes(32)
            self._num_keys += 1
            grids = {k: v for k, v in features.items() if k in POSITION_FEATURES}
            placed.append(PlacedItem(self.kind, placeholder, key, grids))
            made[key] = self.runner.encode(self.kind, features)
        return placed, made

    # In Afferent

    def begin(self, name: str, prepared: Prepared, sampling: Sampling = GREEDY) -> None:
        self.runner.begin(name, prepared.prompt.token_ids, prepared.items, sampling)

    def whole(self, name: str, prepared: Prepared) -> int:
        """Compute the whole prompt in one chunk; return the first token."""
        chunk = Chunk(name, 0, len(prepared.prompt.token_ids), samples=True)
        return _only(self.runner.run([chunk], [], prepared.embeddings))

    def decode(self, name: str) -> int:
        return _only(self.runner.run([], [name], {}))

    # In `transformers`

    def generate(self, prompt: Prompt, media: list[Media]) -> list[int]:
        """Return the greedy tokens; check that each has a clear lead."""
        ids = torch.tensor([prompt.token_ids])
        named = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if self.runner.info.cross_attention:
            named = {"decoder_input_ids": ids}
        # Whisper's own `generate` cuts long clips and adds time stamps.
        out = GenerationMixin.generate(
            self.reference,
            **named,
            **self._arguments(ids, media),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
        )
        for logits in out.logits:
            best = logits[0].topk(2).values
            assert best[0] - best[1] > SMALLEST_LEAD, "another seed, please"
        tokens: list[int] = out.sequences[0, len(prompt.token_ids) :].tolist()
        return tokens

    def _arguments(self, input_ids: torch.Tensor, media: list[Media]) -> dict[str, Any]:
        arguments = self._encoder_arguments(media) if media else {}
        if self.runner.info.cross_attention:
            return arguments
        types = (input_ids == self.family.tokens[self.kind].embed).int()
        if hasattr(self.reference.model, "get_rope_index"):
            arguments["mm_token_type_ids"] = types * (1 + (self.kind is Modality.VIDEO))
        if not self.runner.info.can_split_items:
            arguments["token_type_ids"] = types
        return arguments

    def _encoder_arguments(self, media: list[Any]) -> dict[str, Any]:
        """Return the encoder's inputs, made by `transformers` where its processor loads here."""
        if isinstance(self.family, AdapterFamily) and self.family.native is not None:
            processor = AutoImageProcessor.from_pretrained(self.folder)
            images = [Image.fromarray(item.pixels) for item in media]
            layout = self.family.native.processor_layout
            arguments = {} if layout is None else layout.arguments
            made = dict(processor(images=images, return_tensors="pt", **arguments))
            made.pop("num_crops", None)  # only for Gemma 3's whole processor
            return made
        if self.kind is Modality.AUDIO:
            extractor = WhisperFeatureExtractor.from_pretrained(self.folder)
            extracted = [
                extractor(item.samples, sampling_rate=16_000, return_tensors="pt").input_features
                for item in media
            ]
            return {"input_features": torch.cat(extracted)}
        features = [self.features(item) for item in media]
        tensors = [{k: torch.from_numpy(v) for k, v in item.items()} for item in features]
        inputs = [self.family.model_inputs(item) for item in tensors]
        # Idefics3's encoder takes the images of one request, not a batch of images.
        dim = 1 if self.reference.config.model_type == "idefics3" else 0
        joined = {name: torch.cat([each[name] for each in inputs], dim) for name in inputs[0]}
        if "second_per_grid_ts" in tensors[0]:
            joined["second_per_grid_ts"] = torch.cat([t["second_per_grid_ts"] for t in tensors])
        return joined


def _only(chosen: list[Chosen]) -> int:
    (one,) = chosen
    return one.token_id


def prepare_all(model: Model) -> list[Prepared]:
    """Return requests with 0 to 4 items; a request to Whisper has exactly one."""
    rng = np.random.default_rng(model.seed)
    nums = (1, 1, 1, 1) if model.runner.info.cross_attention else (2, 0, 4, 1, 3)
    return [model.prepare(num_items, rng) for num_items in nums]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe for a model's folder, with the same weights each time.

    ``make`` is ``None`` for the built-in model; ``seed`` draws requests whose tokens have a clear
    lead.
    """

    make: Callable[[Path], None] | None
    kind: Modality = Modality.IMAGE
    is_reference: bool = True
    seed: int = 5

    def load(self, folder: Path, group: Group | None = None) -> Model:
        """Load the model from a folder that ``make`` has filled."""
        found = BUILT_IN_MODELS / "shapes" if self.make is None else folder
        return Model(found, self.kind, is_reference=self.is_reference, seed=self.seed, group=group)

    def make_and_load(self, folder: Path) -> Model:
        if self.make is not None:
            self.make(folder)
        return self.load(folder)


def _qwen(generation: str, kind: Modality, num_kv_heads: int = 2, seed: int = 5) -> Recipe:
    make = functools.partial(
        families.make_qwen_vl, generation=generation, num_key_value_heads=num_kv_heads
    )
    return Recipe(make, kind, is_reference=kind is Modality.IMAGE, seed=seed)


MODELS: dict[str, Recipe] = {
    # uint8 features may differ by 1 of 255, which must not change the answer.
    "shapes": Recipe(None, is_reference=False),
    "shapes reference": Recipe(None),
    "shapes video": Recipe(None, Modality.VIDEO, is_reference=False),
    "qwen2": _qwen("qwen2", Modality.IMAGE),
    "qwen2 video": _qwen("qwen2", Modality.VIDEO),
    "qwen2.5": _qwen("qwen2_5", Modality.IMAGE),
    "qwen2.5 video": _qwen("qwen2_5", Modality.VIDEO),
    "qwen3": _qwen("qwen3", Modality.IMAGE),
    "qwen3 video": _qwen("qwen3", Modality.VIDEO),
    "llava": Recipe(make_llava),
    "gemma3": Recipe(families.make_gemma3),
    "internvl": Recipe(families.make_internvl),
    "idefics3": Recipe(families.make_idefics3),
    "smolvlm": Recipe(families.make_smolvlm),
    "llava_next": Recipe(families.make_llava_next),
    "llava_onevision": Recipe(families.make_llava_onevision),
    "pixtral": Recipe(families.make_pixtral),
    "mistral3": Recipe(families.make_mistral3),
    "lighton_ocr": Recipe(families.make_lighton_ocr),
    "glm4v": Recipe(families.make_glm4v),
    "glm_ocr": Recipe(families.make_glm_ocr),
    "voxtral": Recipe(make_voxtral, Modality.AUDIO),
    "whisper": Recipe(families.make_whisper, Modality.AUDIO),
}

FOUR_HEADS = _qwen("qwen2", Modality.IMAGE, num_kv_heads=4, seed=1)
"""A model that four ranks can share."""
