"""Families whose features depend on the size of an image, against `transformers`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

from afferent.builtin.engine.model.runner import load_model
from afferent.errors import InvalidMedia, UnsupportedMedia
from afferent.media.decoded import Array, DecodedAudio, DecodedImage
from afferent.media.families.adapter import AdapterFamily
from afferent.media.families.anyres import AnyResolutionFamily
from afferent.media.families.idefics3 import Idefics3Family
from afferent.media.families.pixtral import PixtralFamily
from afferent.media.families.registry import AnyFamily, describe
from afferent.media.headers.probe import AudioHeader, ImageHeader
from afferent.types import Modality
from tests.engine import families
from tests.media.folders import decoded_images

Known = AnyResolutionFamily | Idefics3Family | PixtralFamily
MAKERS: dict[str, Callable[[Path], None]] = {
    "llava_next": families.make_llava_next,
    "llava_onevision": families.make_llava_onevision,
    "idefics3": families.make_idefics3,
    "smolvlm": families.make_smolvlm,
    "pixtral": families.make_pixtral,
    "mistral3": families.make_mistral3,
}
FAR = 3
"""Of 255: Idefics3's images are resized three times, each with an error of up to 1."""


@pytest.fixture(scope="module", params=MAKERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)  # with small tensors, more threads only wait for each other
    made = tmp_path_factory.mktemp("model")
    MAKERS[request.param](made)
    return made


def known(folder: Path) -> Known:
    family = describe(folder)
    assert isinstance(family, Known)
    return family


def process(family: AnyFamily, image: DecodedImage) -> dict[str, Array]:
    plan = family.plan(image.header)
    assert plan is not None
    out = {name: np.full(s.shape, 77, np.dtype(s.dtype)) for name, s in plan.specs.items()}
    family.process(image, out)
    return out


def inputs(family: AnyFamily, features: dict[str, Array]) -> dict[str, torch.Tensor]:
    return family.model_inputs({n: torch.from_numpy(array) for n, array in features.items()})


def usable(family: Known, count: int) -> list[DecodedImage]:
    """Return the images that the family accepts; the others are too narrow."""
    found = []
    for image in decoded_images(seed=4, count=count):
        try:
            family.plan(image.header)
        except InvalidMedia:
            assert max(image.pixels.shape) > 50 * min(image.pixels.shape[:2])
        else:
            found.append(image)
    assert len(found) > 0.9 * count
    return found


def test_as_the_processor_makes_them(folder: Path) -> None:
    family, reference = known(folder), describe(folder, reference=True)
    assert isinstance(reference, AdapterFamily)
    layout = family.processor_layout
    processor = AutoImageProcessor.from_pretrained(folder)
    num_far = num_values = 0
    for image in usable(family, 80):
        pixels = Image.fromarray(image.pixels)
        expected = processor(images=pixels, return_tensors="np", **layout.arguments)
        exact = process(reference, image)
        for name, array in exact.items():
            np.testing.assert_array_equal(array, expected[name])
        ready = inputs(family, process(family, image))
        assert set(exact) <= set(ready) <= set(expected)
        for name, tensor in ready.items():
            assert tensor.numpy().dtype == np.asarray(expected[name]).dtype
            assert tensor.shape == np.asarray(expected[name]).shape
            if name != "pixel_values":
                assert (tensor.numpy() == expected[name]).all()
        n = family.normalization
        std = np.array(n.std)[:, None, None]
        apart = np.abs(ready["pixel_values"].numpy() - expected["pixel_values"])
        apart = apart * std / n.rescale_factor
        assert apart.max() < FAR + 0.01
        num_values, num_far = num_values + apart.size, num_far + int((apart > 1.01).sum())
    assert num_far <= 1e-3 * num_values


def test_as_many_rows_as_places(folder: Path) -> None:
    """The model makes the planned number of embeddings, and they depend on the image."""
    family, model = known(folder), load_model(folder)
    nums, sums = set(), set()
    for image in usable(family, 40):
        if family.plan(image.header).num_embeds == 1:  # Mistral 3's own code fails here
            continue
        with torch.inference_mode():
            out = model.get_image_features(**inputs(family, process(family, image)))
        rows = out.pooler_output
        rows = torch.cat(list(rows)) if isinstance(rows, list | tuple) else rows.flatten(0, -2)
        num_embeds = family.plan(image.header).num_embeds
        assert len(rows) == num_embeds
        nums.add(num_embeds)
        sums.add(round(float(rows.abs().sum()), 1))
    assert len(nums) > 1
    assert len(sums) > 20


def test_every_byte_is_written(folder: Path) -> None:
    """An image of one colour has only that colour, and black in its borders."""
    family = known(folder)
    for width, height in [(90, 60), (60, 90), (31, 200), (300, 299), (7, 7)]:
        image = DecodedImage(np.full((height, width, 3), 200, np.uint8))
        pixels = process(family, image)["pixel_values"]
        shown = {0, 200} if isinstance(family, AnyResolutionFamily) else {200}
        assert set(np.unique(pixels).tolist()) <= shown


def test_prompts(folder: Path) -> None:
    """The prompts are those of the whole processors, as far as these work without torchvision."""
    family = known(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    embed = tokenizer.convert_ids_to_tokens(family.image.embed)
    for image in usable(family, 40):
        prompt = family.plan(image.header).prompt
        written = "".join(piece if isinstance(piece, str) else embed * piece for piece in prompt)
        if isinstance(family, AnyResolutionFamily):
            assert written == embed * family.plan(image.header).num_embeds
        elif isinstance(family, PixtralFamily):
            height, width = process(family, image)["image_sizes"][0] // family.unit
            rows = ["[IMG]" * int(width)] * int(height)
            assert written == "[IMG_BREAK]".join(rows) + "[IMG_END]"
        else:
            rows, columns = family.grid(image.header)
            whole: Any = SimpleNamespace(
                image_token=embed,
                image_seq_len=4,
                fake_image_token="<fake_token_around_image>",
                global_image_tag="<global-img>",
            )
            cut = rows * columns > 1
            made = {"rows": [[rows * cut]], "cols": [[columns * cut]]}
            assert written == Idefics3Processor.replace_image_token(whole, made, 0)


def test_images_only(folder: Path) -> None:
    family = known(folder)
    assert set(family.tokens) == {Modality.IMAGE}
    assert family.sample_rate_hz == 0
    assert family.bounded(100) is family
    with pytest.raises(UnsupportedMedia):
        family.plan(AudioHeader(16_000, 1, 5))
    with pytest.raises(UnsupportedMedia):
        family.process(DecodedAudio(np.zeros(5, np.float32), 16_000), {})


def test_an_image_that_is_too_narrow(folder: Path) -> None:
    family = known(folder)
    if isinstance(family, Idefics3Family):
        assert family.plan(ImageHeader(2000, 10)).num_embeds
    else:
        with pytest.raises(InvalidMedia, match="narrow"):
            family.plan(ImageHeader(10_000, 1))


OTHERS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "llava_next": [
        ("preprocessor_config.json", {"size": {"shortest_edge": 84}}),
        ("preprocessor_config.json", {"image_grid_pinpoints": [[56, 112]]}),
        ("preprocessor_config.json", {"do_resize": False}),
        ("config.json", {"vision_feature_select_strategy": "full"}),
        ("config.json", {"vision_config": {"model_type": "another"}}),
    ],
    "llava_onevision": [
        ("preprocessor_config.json", {"size": {"height": 56, "width": 112}}),
        ("preprocessor_config.json", {"do_rescale": False, "do_normalize": False}),
        ("config.json", {"vision_aspect_ratio": "anyres_max_4"}),
        ("processor_config.json", {"vision_aspect_ratio": "anyres_max_4"}),
    ],
    "idefics3": [
        ("preprocessor_config.json", {"size": {"longest_edge": 100}}),
        ("preprocessor_config.json", {"size": {"longest_edge": 5600}}),
        ("preprocessor_config.json", {"max_image_size": {"longest_edge": 28}}),
        ("preprocessor_config.json", {"do_resize": False}),
        ("processor_config.json", {"image_seq_len": 5}),
    ],
    "pixtral": [
        ("preprocessor_config.json", {"size": {"longest_edge": 224}}),
        ("preprocessor_config.json", {"size": {"height": 112, "width": 112}}),
        ("preprocessor_config.json", {"do_resize": False}),
        ("processor_config.json", {"patch_size": 16}),
    ],
    "mistral3": [("processor_config.json", {"spatial_merge_size": 1})],
}


@pytest.mark.parametrize("name", OTHERS)
def test_settings_that_are_not_done(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Unsupported settings are refused, and settings on which model and processor differ."""
    MAKERS[name](tmp_path)
    assert describe(tmp_path) is not None
    assert not caplog.records
    for file, changed in OTHERS[name]:
        path = tmp_path / file
        before = path.read_text()
        path.write_text(json.dumps({**json.loads(before), **changed}))
        assert describe(tmp_path) is None, changed
        logged = caplog.records.pop()
        assert "a family declines a model" in logged.getMessage()
        shown = {key: value for key, value in changed.items() if key != "vision_config"}
        start = file.removesuffix(".json")
        assert shown == {key: vars(logged).get(f"{start}.{key}") for key in shown}
        assert vars(logged)["family"].startswith("afferent.media.families.")
        path.write_text(before)


def test_an_image_that_is_not_cut(tmp_path: Path) -> None:
    families.make_idefics3(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    settings = json.loads(path.read_text()) | {"do_image_splitting": False}
    path.write_text(json.dumps(settings))
    family, processor = known(tmp_path), AutoImageProcessor.from_pretrained(tmp_path)
    for image in usable(family, 10):
        expected = processor(images=Image.fromarray(image.pixels), return_tensors="np")
        ready = inputs(family, process(family, image))["pixel_values"].numpy()
        assert ready.shape == expected["pixel_values"].shape == (1, 1, 3, 56, 56)
        assert np.abs(ready - expected["pixel_values"]).max() < FAR * 2.01 / 255
        assert family.plan(image.header).num_embeds == 4
