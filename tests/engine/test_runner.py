"""The runner chooses the same greedy tokens as plain ``generate``, for more than one family."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForMultimodalLM, WhisperFeatureExtractor

from afferent.engine.runner import EncodedItem, Runner, choose
from afferent.errors import InternalError, InvalidPlaceholders
from afferent.ingest.probe import VideoHeader
from afferent.preprocess.measure import family_of
from afferent.preprocess.media import Media, Picture, Sound
from afferent.preprocess.registry import plan_for_sure
from afferent.serve.prompt import PromptBuilder
from afferent.serve.request import MediaPart, Message, TextPart
from afferent.supervise import BUILT_IN_MODELS
from afferent.testing.pictures import draw_picture
from afferent.types import Modality, Placeholder, Sampling
from tests.models import make_features, make_llava, make_voxtral

NUM_TOKENS = 12
GREEDY = Sampling(max_tokens=NUM_TOKENS)


class Model:
    """One model, run by us and by `transformers`, on media of one kind."""

    def __init__(self, folder: Path, kind: Modality, *, is_reference: bool = True) -> None:
        self.family = family_of(folder, reference=is_reference)
        self.kind = kind
        self.prompts = PromptBuilder(folder, self.family)
        self.runner = Runner(folder, self.family)
        self.reference = AutoModelForMultimodalLM.from_pretrained(folder).eval()
        self.folder = folder

    def draw(self, rng: np.random.Generator) -> Media:
        match self.kind:
            case Modality.IMAGE:
                return Picture(np.array(draw_picture(rng, max_side=300).image))
            case Modality.AUDIO:
                samples = rng.normal(0, 0.1, int(rng.integers(8_000, 24_000)))
                return Sound(samples.astype(np.float32), 16_000)
            case Modality.VIDEO:
                shape = (int(rng.integers(2, 9)), 90, 120, 3)
                return Frames(rng.integers(0, 256, shape).astype(np.uint8))

    def features(self, media: Media) -> dict[str, Any]:
        return make_features(self.family, media)

    def inputs(self, num_items: int, rng: np.random.Generator) -> tuple[Any, list[Media]]:
        media = [self.draw(rng) for _ in range(num_items)]
        parts = (*(MediaPart(self.kind, "") for _ in media), TextPart("What is in the picture?"))
        written = [plan_for_sure(self.family, item.header).prompt for item in media]
        return self.prompts.build([Message("user", parts)], written), media

    def item(self, placeholder: Placeholder, media: Media) -> EncodedItem:
        features = self.features(media)
        grids = {k: v for k, v in features.items() if k.endswith("_grid_thw")}
        return EncodedItem(self.kind, placeholder, grids, self.runner.encode(self.kind, features))

    def start(self, sequence_id: str, prompt: Any, media: list[Media]) -> list[int]:
        items = list(map(self.item, prompt.placeholders, media))
        return [self.runner.prefill(sequence_id, prompt.token_ids, items, GREEDY)]

    def arguments(self, media: list[Any]) -> dict[str, Any]:
        """What `transformers`' own processor makes, but for videos, which it can't load."""
        if not media:
            return {}
        if self.kind is Modality.IMAGE:
            processor = AutoImageProcessor.from_pretrained(self.folder)
            images = [Image.fromarray(item.pixels) for item in media]
            return dict(processor(images=images, return_tensors="pt"))
        if self.kind is Modality.AUDIO:
            extractor = WhisperFeatureExtractor.from_pretrained(self.folder)
            made = [
                extractor(item.samples, sampling_rate=16_000, return_tensors="pt").input_features
                for item in media
            ]
            return {"input_features": torch.cat(made)}
        features = [self.features(item) for item in media]
        tensors = [{k: torch.from_numpy(v) for k, v in item.items()} for item in features]
        inputs = [self.family.model_inputs(item) for item in tensors]
        return {name: torch.cat([each[name] for each in inputs]) for name in inputs[0]}

    def generate(self, prompt: Any, media: list[Media]) -> list[int]:
        input_ids = torch.tensor([prompt.token_ids])
        arguments = self.arguments(media)
        if hasattr(self.reference.model, "get_rope_index"):
            is_embed = input_ids == self.family.tokens[self.kind].embed
            arguments["mm_token_type_ids"] = is_embed.int() * (1 + (self.kind is Modality.VIDEO))
        out = self.reference.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            eos_token_id=-1,
            **arguments,
        )
        return out[0, len(prompt.token_ids) :].tolist()


class Frames:
    """A video that is decoded already."""

    def __init__(self, pixels: NDArray[np.uint8]) -> None:
        self._pixels = pixels
        count, height, width, _ = pixels.shape
        self.header = VideoHeader(width, height, count, 2.0)

    def frames(self, indices: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        yield from self._pixels[list(indices)]


@pytest.fixture(
    scope="module", params=["shapes", "shapes reference", "shapes video", "llava", "voxtral"]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    shapes = BUILT_IN_MODELS / "shapes"
    folder = tmp_path_factory.mktemp("model")
    match request.param:
        case "shapes":  # bytes may change a value by 1 of 255, and must not change the answer
            return Model(shapes, Modality.IMAGE, is_reference=False)
        case "shapes reference":
            return Model(shapes, Modality.IMAGE)
        case "shapes video":
            return Model(shapes, Modality.VIDEO, is_reference=False)
        case "llava":
            make_llava(folder)
            return Model(folder, Modality.IMAGE)
        case _:
            make_voxtral(folder)
            return Model(folder, Modality.AUDIO, is_reference=False)


def test_same_tokens_as_generate(model: Model, rng: np.random.Generator) -> None:
    for num_items in (0, 1, 2, 3):
        prompt, images = model.inputs(num_items, rng)
        tokens = model.start("one", prompt, images)
        tokens += [model.runner.decode("one") for _ in range(NUM_TOKENS - 1)]
        model.runner.drop("one")
        assert tokens == model.generate(prompt, images)


def test_interleaved_sequences_do_not_disturb_each_other(
    model: Model, rng: np.random.Generator
) -> None:
    """Above all their positions: the model itself remembers only its last call's."""
    inputs = {str(n): model.inputs(n, rng) for n in (2, 0, 1)}
    tokens = {name: model.start(name, *given) for name, given in inputs.items()}
    for _ in range(NUM_TOKENS - 1):
        for name in inputs:
            tokens[name].append(model.runner.decode(name))
    for name, given in inputs.items():
        model.runner.drop(name)
        assert tokens[name] == model.generate(*given)


def test_the_picture_matters(model: Model, rng: np.random.Generator) -> None:
    """Or else the tests above would prove little."""
    answers = set()
    for _ in range(4):
        prompt, images = model.inputs(1, rng)
        tokens = model.start("one", prompt, images)
        answers.add(tuple(tokens + [model.runner.decode("one") for _ in range(NUM_TOKENS - 1)]))
        model.runner.drop("one")
    assert len(answers) > 1


def test_embeddings_must_fill_the_placeholder(model: Model, rng: np.random.Generator) -> None:
    prompt, media = model.inputs(1, rng)
    item = model.item(prompt.placeholders[0], media[0])
    item.embeddings[-1] = item.embeddings[-1][:-1]
    with pytest.raises(InternalError):
        model.runner.prefill("one", prompt.token_ids, [item], GREEDY)


def test_placeholders_are_checked(model: Model, rng: np.random.Generator) -> None:
    prompt, media = model.inputs(2, rng)
    items = list(map(model.item, prompt.placeholders, media))
    with pytest.raises(InvalidPlaceholders):
        model.runner.prefill("one", prompt.token_ids, items[::-1], GREEDY)
    with pytest.raises(InternalError, match="outside"):
        model.runner.prefill("one", prompt.token_ids[:-20], items, GREEDY)


@pytest.fixture
def read_only() -> Iterator[Callable[[np.ndarray], np.ndarray]]:
    def make(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.flags.writeable = False
        return array

    return make


def test_features_are_read_in_place(model: Model, read_only: Any, rng: np.random.Generator) -> None:
    """What the family finishes lies at the address where the features lie; read-only is fine."""
    _, media = model.inputs(1, rng)
    features = {k: read_only(v) for k, v in model.features(media[0]).items()}
    seen: dict[str, int] = {}

    class Spy:
        tokens = model.family.tokens

        def model_inputs(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
            seen.update({name: tensor.data_ptr() for name, tensor in tensors.items()})
            return model.family.model_inputs(tensors)

    model.runner._family = Spy()  # type: ignore[assignment]
    try:
        model.runner.encode(model.kind, features)
    finally:
        model.runner._family = model.family
    assert seen == {name: array.ctypes.data for name, array in features.items()}


def test_choose() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    assert choose(logits, GREEDY) == 1

    def draws(**parameters: Any) -> set[int]:
        sampling = Sampling(max_tokens=1, temperature=2.0, **parameters)
        generator = torch.Generator().manual_seed(0)
        return {choose(logits, sampling, generator) for _ in range(400)}

    assert draws() == {0, 1, 2, 3}
    assert draws(top_k=2) == {1, 3}
    assert draws(top_p=0.01) == {1}
    assert draws(top_p=0.6) == {1, 3}
