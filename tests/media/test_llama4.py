"""Llama 4's tiles against the functions of `transformers`' processor.

The processor's module imports torchvision, so that its functions are taken out of the file here;
`tests/vllm/test_families.py` compares with the whole processor.
"""

from __future__ import annotations

import ast
import functools
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.functional import interpolate, pad
from transformers.image_utils import SizeDict

from afferent.builtin.engine.model.runner import Runner
from afferent.conformance import CHECKS_OF_FAMILIES, check_family
from afferent.errors import UnsupportedMedia, UnsupportedModel
from afferent.media.decoded import DecodedAudio, DecodedImage
from afferent.media.families.family import MediaTokens
from afferent.media.families.llama4 import Llama4Family
from afferent.media.families.registry import describe
from afferent.media.families.settings import BILINEAR
from afferent.media.headers.probe import AudioHeader, ImageHeader
from afferent.media.transforms.normalize import Normalization
from afferent.media.transforms.resize import Resampling
from afferent.types import Modality
from tests.engine import families
from tests.examples import examples
from tests.media.folders import decoded_images

SIDE, HALF = 28, (0.5, 0.5, 0.5)


def functions_of_the_processor() -> dict[str, Any]:
    path = Path(transformers.__file__).parent / "models" / "llama4" / "image_processing_llama4.py"
    tree = ast.parse(path.read_text())
    names: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "SizeDict": SizeDict,
        "defaultdict": defaultdict,
        "lru_cache": functools.lru_cache,
    }
    wanted = [each for each in tree.body if isinstance(each, ast.FunctionDef)]
    exec(ast.unparse(wanted), names)  # noqa: S102 the code of the installed transformers
    return names


THEIRS = functions_of_the_processor()


def theirs(pixels: np.ndarray[Any, Any], max_tiles: int, *, is_enlarged: bool) -> torch.Tensor:
    """Return the tiles that the processor makes, by its own functions and torch's resizing."""
    image = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None]
    size = (pixels.shape[0], pixels.shape[1])
    grids = torch.tensor(
        THEIRS["find_supported_resolutions"](max_tiles, SizeDict(height=SIDE, width=SIDE))
    )
    target = THEIRS["get_best_fit"](size, grids, is_enlarged)
    height, width = their_size(size, target, is_enlarged=is_enlarged)
    canvas = target.tolist()
    shown = pad(_resized(image, height, width), (0, canvas[1] - width, 0, canvas[0] - height))
    rows, columns = canvas[0] // SIDE, canvas[1] // SIDE
    cut = shown.view(3, rows, SIDE, columns, SIDE).permute(1, 3, 0, 2, 4).flatten(0, 1)
    if rows * columns > 1:
        cut = torch.cat([cut, _resized(image, SIDE, SIDE)])
    scaled = cut.to(torch.bfloat16) * (1 / 255)
    half = torch.tensor([0.5] * 3, dtype=torch.bfloat16).view(3, 1, 1)
    return scaled.sub(half).div(half)


def their_size(
    size: tuple[int, int], target: torch.Tensor, *, is_enlarged: bool
) -> tuple[int, int]:
    """Return height and width on the canvas, computed with tensors where the processor has them."""
    within = tuple(target)
    if not is_enlarged:
        within = tuple(min(max(side, SIDE), most) for side, most in zip(size, target, strict=True))
    height, width = THEIRS["get_max_res_without_distortion"](size, within)
    return max(1, int(height)), max(1, int(width))


def _resized(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    if image.shape[-2:] == (height, width):
        return image
    return interpolate(image, (height, width), mode="bilinear", antialias=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("model")
    families.make_llama4(made)
    return made


def known(folder: Path, **changed: Any) -> Llama4Family:
    path = folder / "preprocessor_config.json"
    before = path.read_text()
    path.write_text(json.dumps({**json.loads(before), **changed}))
    family = describe(folder, resize_rule="torchvision")
    path.write_text(before)
    assert isinstance(family, Llama4Family)
    return family


@pytest.mark.parametrize("is_enlarged", [False, True])
def test_tiles_are_those_of_the_processor_to_the_last_bit(folder: Path, is_enlarged: bool) -> None:
    family = known(folder, resize_to_max_canvas=is_enlarged)
    grids = set()
    for image in decoded_images(seed=6, count=150):
        plan = family.plan(image.header)
        out = {name: np.full(s.shape, 77, np.dtype(s.dtype)) for name, s in plan.specs.items()}
        family.process(image, out)
        expected = theirs(image.pixels, 6, is_enlarged=is_enlarged)
        ready = family.model_inputs({n: torch.from_numpy(array) for n, array in out.items()})
        assert ready["pixel_values"].dtype == torch.float32
        assert torch.equal(ready["pixel_values"], expected.float())
        rows, columns = (int(each) for each in out["aspect_ratios"][0])
        grids.add((rows, columns))
        assert (rows, columns) == family.grid(image.header.width, image.header.height)
        written = "".join(p if isinstance(p, str) else "<|patch|>" * p for p in plan.prompt)
        assert written == _prompt(rows, columns)
    assert len(grids) > 8


def _prompt(rows: int, columns: int) -> str:
    """Write a prompt as `Llama4Processor._prompt_split_image` does."""
    tile = "<|patch|>" * 4
    row = "<|tile_x_separator|>".join([tile] * columns) + "<|tile_y_separator|>"
    cut = row * rows if rows * columns > 1 else ""
    return f"<|image_start|>{cut}<|image|>{tile}<|image_end|>"


@given(st.integers(1, 600), st.integers(1, 600), st.integers(1, 16), st.booleans())
@example(110, 165, 6, False)
@examples(500, storm=5000)
def test_grid_of_any_size(width: int, height: int, max_tiles: int, is_enlarged: bool) -> None:
    family = _any_family(max_tiles, is_enlarged=is_enlarged)
    grids = THEIRS["find_supported_resolutions"](max_tiles, SizeDict(height=SIDE, width=SIDE))
    expected = THEIRS["get_best_fit"]((height, width), torch.tensor(grids), is_enlarged)
    rows, columns = family.grid(width, height)
    assert [rows * SIDE, columns * SIDE] == expected.tolist()
    size = their_size((height, width), expected, is_enlarged=is_enlarged)
    assert family.fitted(width, height, rows, columns) == size[::-1]


@functools.cache
def _any_family(max_tiles: int, *, is_enlarged: bool) -> Llama4Family:
    return Llama4Family(
        image=MediaTokens(1, 2),
        side=SIDE,
        max_tiles=max_tiles,
        num_embeds=4,
        is_enlarged=is_enlarged,
        resampling=Resampling(BILINEAR),
        normalization=Normalization(rescale_factor=1 / 255, mean=HALF, std=HALF),
    )


def test_fewer_tiles_for_fewer_pixels(folder: Path) -> None:
    family = known(folder)
    assert family.max_tiles == 6
    assert family.bounded(7 * SIDE**2) is family
    for most in range(1, 8):
        bounded = family.bounded(most * SIDE**2)
        tiles = bounded.plan(ImageHeader(300, 40)).specs["pixel_values"].shape[0]
        assert tiles <= max(most, 1)


def test_images_only(folder: Path) -> None:
    family = known(folder)
    assert set(family.tokens) == {Modality.IMAGE}
    assert family.image.marker != family.image.embed
    with pytest.raises(UnsupportedMedia):
        family.plan(AudioHeader(16_000, 1, 5))
    with pytest.raises(UnsupportedMedia):
        family.process(DecodedAudio(np.zeros(5, np.float32), 16_000), {})


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("preprocessor_config.json", {"size": {"height": 56, "width": 56}}),
        ("preprocessor_config.json", {"size": {"height": 28, "width": 56}}),
        ("preprocessor_config.json", {"do_normalize": False}),
        ("preprocessor_config.json", {"do_rescale": False}),
        ("preprocessor_config.json", {"image_processor_type": "AnotherProcessor"}),
        ("processor_config.json", {"patch_size": 14}),
        ("processor_config.json", {"pixel_shuffle_ratio": 0.25}),
        ("tokenizer.json", {"added_tokens": []}),
    ],
)
def test_settings_that_are_not_done(file: str, changed: dict[str, Any], tmp_path: Path) -> None:
    families.make_llama4(tmp_path)
    assert describe(tmp_path) is not None
    path = tmp_path / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    assert describe(tmp_path) is None


def test_pillows_rule_differs_little(folder: Path) -> None:
    """By Pillow's rule, which the built-in engine would use, bytes differ by 2 at most."""
    ours, family = describe(folder), known(folder)
    assert isinstance(ours, Llama4Family)
    for image in decoded_images(seed=7, count=30):
        made = []
        for each in (ours, family):
            specs = each.plan(image.header).specs
            out = {name: np.full(s.shape, 77, np.dtype(s.dtype)) for name, s in specs.items()}
            each.process(DecodedImage(image.pixels), out)
            made.append(out["pixel_values"].astype(int))
        assert np.abs(made[0] - made[1]).max() <= 2


@pytest.mark.parametrize("name", CHECKS_OF_FAMILIES)
def test_family_keeps_its_promises(name: str, folder: Path) -> None:
    check_family(name, known(folder), sizes=[(64, 48), (33, 200), (250, 90), (1, 1)])


def test_built_in_engine_refuses_it(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="not all layers"):
        Runner(folder, known(folder))
