"""``form="hf"`` of `afferent.Features` against the models' own processors, to the last bit."""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers import AutoImageProcessor

from afferent import FeaturePlan, Features, Modality
from afferent.errors import InvalidMedia, UnsupportedModel
from afferent.media.families.registry import describe
from afferent.media.transforms.normalize import NO_MEAN, NO_STD, Normalization
from tests.images import encoded, in_mode, oriented, photo
from tests.media.folders import make_idefics3
from tests.media.golden_features import FAMILIES

MODES = ("L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "1", "EXIF")
NUM_IMAGES, NUM_IN_A_STORM = 45, 200
"""Images for each family: five of each mode, and more with --storm."""
OF_THE_PROCESSOR = {
    *("num_crops", "batch_num_images", "num_patches"),
    *("grids", "num_patches_per_image"),
}
"""Outputs of image processors that the whole processors drop, or models don't need."""
BACKENDS = [
    pytest.param("pil"),
    pytest.param(
        "torchvision",
        marks=pytest.mark.skipif(
            find_spec("torchvision") is None, reason="torchvision is not installed"
        ),
    ),
]
_OTHERS = ("whisper", "qwen2_audio", "voxtral", "llama4", "internvl_chat")
IMAGE_FAMILIES = [name for name in FAMILIES if name not in _OTHERS]


@pytest.fixture(scope="module", params=IMAGE_FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)  # with small tensors, more threads only wait for each other
    made = tmp_path_factory.mktemp("model")
    FAMILIES[request.param](made)
    return made


@functools.cache
def random_files(count: int, seed: int = 0) -> tuple[bytes, ...]:
    """Return image files of random sizes, of each mode in turn; all families take the same ones."""
    return tuple(_random_files(count, seed))


def _random_files(count: int, seed: int) -> Iterator[bytes]:
    rng = np.random.default_rng(seed)
    for number in range(count):
        width, height = (int(side) for side in rng.integers(20, 260, 2))
        image, mode = photo(width, height, number), MODES[number % len(MODES)]
        if mode == "CMYK":
            yield encoded(image.convert("CMYK"), "JPEG")
        elif mode == "EXIF":
            yield encoded(image, "JPEG", exif=oriented(int(rng.integers(2, 9))))
        else:
            yield encoded(in_mode(image, mode), "PNG")


def opened(data: bytes) -> Image.Image:
    """Open a file as `transformers` does."""
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data)))


def processor_of(folder: Path, backend: str) -> Any:
    """Return the model's image processor, with the arguments that the whole processor gives it."""
    made = AutoImageProcessor.from_pretrained(folder, backend=backend)
    assert type(made).__name__.endswith("Pil") == (backend == "pil")
    arguments: dict[str, Any] = {}
    if "GotOcr2" in type(made).__name__:  # InternVL
        arguments["crop_to_patches"] = True
    if "Pixtral" in type(made).__name__ and (family := describe(folder)) is not None:
        assert family.processor_layout is not None
        arguments |= family.processor_layout.arguments
    return functools.partial(made, **arguments)


def assert_same_bits(ours: Any, theirs: Any) -> None:
    assert set(theirs) - OF_THE_PROCESSOR == set(ours)
    for name, array in ours.items():
        expected = np.asarray(theirs[name])
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape), name
        assert array.tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_float_form_of_nine_modes_equals_the_processor(
    folder: Path, backend: Any, request: pytest.FixtureRequest
) -> None:
    num_images = NUM_IN_A_STORM if request.config.getoption("--storm") else NUM_IMAGES
    processor = processor_of(folder, backend)
    with Features(folder, backend=backend) as features:
        files = random_files(num_images)
        num_compared = 0
        for data, made in zip(files, features.make_many(files, form="hf"), strict=True):
            assert_same_bits(made, processor(images=opened(data), return_tensors="np"))
            assert made.made_by == "afferent"
            assert made.form == "hf"
            num_compared += 1
        assert num_compared == num_images


@pytest.mark.parametrize("backend", BACKENDS)
def test_float_form_of_pil_images_and_arrays_equals_the_processor(
    folder: Path, backend: Any
) -> None:
    processor = processor_of(folder, backend)
    with Features(folder, backend=backend) as features:
        for number, mode in enumerate(MODES[:-1]):
            image = in_mode(photo(90, 70, number), mode)
            expected = processor(images=image, return_tensors="np")
            assert_same_bits(features.make(image, form="hf"), expected)
        pixels = np.array(photo(70, 90, 3))
        expected = processor(images=pixels, return_tensors="np")
        assert_same_bits(features.make(pixels, form="hf"), expected)


def test_plan_equals_the_sizes_of_both_forms(folder: Path) -> None:
    with Features(folder) as features:
        for data in random_files(27, seed=4):
            for form in ("compact", "hf"):
                made = features.make(data, form=form)
                plan = features.plan(data, form=form)
                assert isinstance(plan, FeaturePlan)
                assert sizes(plan) == {n: (a.dtype.name, a.shape) for n, a in made.items()}
                assert plan.prompt == made.prompt
                assert plan.num_embeds == made.num_embeds > 0
                assert features.plan(opened(data).size, form=form) == plan


def sizes(plan: FeaturePlan) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (spec.dtype, spec.shape) for name, spec in plan.specs.items()}


def test_plan_needs_only_the_header(folder: Path) -> None:
    with Features(folder) as features:
        data = encoded(photo(640, 480), "JPEG", quality=95)
        assert features.plan(data[:2048]) == features.plan(data)
        with pytest.raises(InvalidMedia):
            features.make(data[:2048])


def test_model_inputs_of_both_forms_are_equal_with_torchvisions_arithmetic(folder: Path) -> None:
    """With Pillow's they differ in the last bits only."""
    for backend in ("torchvision", "pil"):
        with Features(folder, backend=backend) as features:
            data = random_files(1)[0]
            ready = features.model_inputs(features.make(data))
            exact = features.model_inputs(features.make(data, form="hf"))
            assert set(ready) == set(exact)
            for name, tensor in exact.items():
                if backend == "torchvision":
                    assert torch.equal(ready[name], tensor), name
                torch.testing.assert_close(ready[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("factor", [1 / 255, 1 / 127.5, 1.0])
def test_arithmetic_of_torchvision_is_reproduced_without_it(factor: float) -> None:
    """As in `TorchvisionBackend.rescale_and_normalize` of `transformers`."""
    values = np.arange(256, dtype=np.uint8).repeat(3).reshape(256, 3, 1, 1)
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    normalization = Normalization(rescale_factor=factor, mean=mean, std=std)
    tensor = torch.from_numpy(values)
    scaled = [torch.tensor(each) * (1.0 / factor) for each in (mean, std)]
    fused = tensor.to(torch.float32).sub(scaled[0].view(-1, 1, 1)).div_(scaled[1].view(-1, 1, 1))
    assert normalization.floats(values, "fused").tobytes() == fused.numpy().tobytes()
    assert normalization.apply(tensor).numpy().tobytes() == fused.numpy().tobytes()
    product = (tensor * factor).numpy().tobytes()
    assert normalization.floats(values, "rescaled").tobytes() == product
    plain = Normalization(rescale_factor=factor, mean=NO_MEAN, std=NO_STD)
    assert plain.apply(tensor).numpy().tobytes() == product


def test_model_whose_processor_makes_bfloat16_has_no_float_form(tmp_path: Path) -> None:
    FAMILIES["llama4"](tmp_path)
    with Features(tmp_path) as features:
        image = photo(60, 40)
        assert features.model_inputs(features.make(image))["pixel_values"].dtype == torch.float32
        with pytest.raises(UnsupportedModel, match="take the compact form"):
            features.make(image, form="hf")


def test_a_model_without_a_family_uses_its_own_processor(tmp_path: Path) -> None:
    make_idefics3(tmp_path)
    image = photo(90, 64, 3)
    backend = "torchvision" if find_spec("torchvision") else "pil"  # that of `transformers`
    expected = processor_of(tmp_path, backend)(images=image, return_tensors="np")
    with Features(tmp_path) as features:
        assert features.made_by == "transformers"
        assert features.modalities == (Modality.IMAGE,)
        for form in ("compact", "hf"):
            made = features.make(encoded(image, "PNG"), form=form)
            assert made.made_by == "transformers"
            assert made["pixel_values"].tobytes() == expected["pixel_values"].tobytes()
            assert sizes(features.plan((90, 64))) == {
                n: (a.dtype.name, a.shape) for n, a in made.items()
            }
        with Features(tmp_path, where="pool", num_workers=1) as pool:
            again = pool.make(encoded(image, "PNG"), form="hf")
            assert again["pixel_values"].tobytes() == expected["pixel_values"].tobytes()
            assert again.made_by == "transformers"
