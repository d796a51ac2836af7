"""The runner chooses the same greedy tokens as plain ``generate``, for more than one family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from afferent.engine.runner import EncodedItem, Runner, choose
from afferent.errors import InternalError, InvalidPlaceholders
from afferent.preprocess.measure import family_of
from afferent.preprocess.processor import HuggingFaceProcessor
from afferent.serve.prompt import PromptBuilder
from afferent.serve.request import ImagePart, Message, TextPart
from afferent.supervise import BUILT_IN_MODELS
from afferent.testing.pictures import draw_picture
from afferent.types import Sampling
from tests.models import make_llava

NUM_TOKENS = 12
GREEDY = Sampling(max_tokens=NUM_TOKENS)


class Model:
    """One model, run by us and by `transformers`."""

    def __init__(self, folder: Path) -> None:
        self.family = family_of(folder)
        self.processor = HuggingFaceProcessor(folder, self.family)
        self.prompts = PromptBuilder(folder, self.family)
        self.runner = Runner(folder)
        self.reference = AutoModelForImageTextToText.from_pretrained(folder).eval()
        self.reference_processor = AutoImageProcessor.from_pretrained(folder)

    def inputs(self, num_images: int, rng: np.random.Generator) -> tuple[Any, list[Any]]:
        images = [draw_picture(rng, max_side=300).image for _ in range(num_images)]
        parts = (*(ImagePart("") for _ in images), TextPart("What is in the picture?"))
        plans = [self.family.plan(*image.size) for image in images]
        return self.prompts.build([Message("user", parts)], plans), images

    def start(self, sequence_id: str, prompt: Any, images: list[Any]) -> list[int]:
        items = []
        for placeholder, image in zip(prompt.placeholders, images, strict=True):
            features = self.processor.process(image)
            grids = {k: v for k, v in features.items() if k.endswith("_grid_thw")}
            items.append(EncodedItem(placeholder, grids, self.runner.encode(features)))
        return [self.runner.prefill(sequence_id, prompt.token_ids, items, GREEDY)]

    def generate(self, prompt: Any, images: list[Any]) -> list[int]:
        input_ids = torch.tensor([prompt.token_ids])
        arguments = (
            dict(self.reference_processor(images=images, return_tensors="pt")) if images else {}
        )
        if hasattr(self.reference.model, "get_rope_index"):
            arguments["mm_token_type_ids"] = (input_ids == self.family.image_token_id).int()
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


@pytest.fixture(scope="module", params=["qwen2_vl", "llava"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    if request.param == "qwen2_vl":
        return Model(BUILT_IN_MODELS / "shapes")
    folder = tmp_path_factory.mktemp("llava")
    make_llava(folder)
    return Model(folder)


def test_same_tokens_as_generate(model: Model, rng: np.random.Generator) -> None:
    for num_images in (0, 1, 2, 3):
        prompt, images = model.inputs(num_images, rng)
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
    prompt, images = model.inputs(1, rng)
    features = model.processor.process(images[0])
    embeddings = [part[:-1] for part in model.runner.encode(features)]
    item = EncodedItem(prompt.placeholders[0], {}, embeddings)
    with pytest.raises(InternalError):
        model.runner.prefill("one", prompt.token_ids, [item], GREEDY)


def test_placeholders_are_checked(model: Model, rng: np.random.Generator) -> None:
    prompt, images = model.inputs(2, rng)
    embeddings = [model.runner.encode(model.processor.process(image)) for image in images]
    items = [
        EncodedItem(placeholder, {}, parts)
        for placeholder, parts in zip(prompt.placeholders, embeddings, strict=True)
    ]
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
    """What the model is given lies at the address where the features lie; read-only is fine."""
    _, images = model.inputs(1, rng)
    features = {k: read_only(v) for k, v in model.processor.process(images[0]).items()}
    seen: dict[str, int] = {}
    original = model.runner._model.get_image_features

    def spy(**tensors: Any) -> Any:
        seen.update({k: t.data_ptr() for k, t in tensors.items() if isinstance(t, torch.Tensor)})
        return original(**tensors)

    model.runner._model.get_image_features = spy
    try:
        model.runner.encode(features)
    finally:
        model.runner._model.get_image_features = original
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
