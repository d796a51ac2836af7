"""MiniCPM-V 4.6's slices against the model's own processor, and its numbered prompts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from transformers import MiniCPMV4_6ImageProcessorPil
from transformers.image_transforms import divide_to_patches

from afferent.builtin.engine.model.runner import Runner
from afferent.builtin.pipeline.prompt import PromptBuilder
from afferent.builtin.pipeline.request import Message, TextPart
from afferent.conformance import CHECKS_OF_FAMILIES, check_family
from afferent.engines.references import NUMBER_RUN, Of
from afferent.errors import UnsupportedModel
from afferent.items.request import MediaPart
from afferent.media.decoded import DecodedImage
from afferent.media.families.family import MediaTokens
from afferent.media.families.minicpm import ENTRY, MiniCpmFamily
from afferent.media.families.plan import numbered
from afferent.media.families.registry import describe
from afferent.media.families.settings import BICUBIC
from afferent.media.families.tokenizer import read_tokenizer
from afferent.media.headers.probe import ImageHeader
from afferent.media.transforms.normalize import Normalization
from afferent.media.transforms.resize import Resampling
from afferent.proxy.prompts import PromptTokens
from afferent.types import ContentKey, Handle, Modality
from tests.engine import families
from tests.examples import examples
from tests.media.folders import decoded_images

SIDE, PATCH, MAX_SLICES, HALF = 56, 7, 6, (0.5, 0.5, 0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("model")
    families.make_minicpm(made)
    return made


def known(folder: Path) -> MiniCpmFamily:
    family = describe(folder)
    assert isinstance(family, MiniCpmFamily)
    return family


def processed(family: MiniCpmFamily, image: DecodedImage) -> dict[str, torch.Tensor]:
    specs = family.plan(image.header).specs
    out = {name: np.full(s.shape, 77, np.dtype(s.dtype)) for name, s in specs.items()}
    family.process(image, out)
    return {name: torch.from_numpy(array) for name, array in out.items()}


def test_patches_are_those_of_the_processor(folder: Path) -> None:
    """Sizes are equal, and pixels; floats but for the rounding of the last bit."""
    family, processor = known(folder), MiniCPMV4_6ImageProcessorPil.from_pretrained(folder)
    grids = set()
    for image in decoded_images(seed=6, count=100):
        expected = processor([Image.fromarray(image.pixels)], return_tensors="pt")
        made = family.model_inputs(processed(family, image))
        assert torch.equal(made["target_sizes"], expected["target_sizes"])
        torch.testing.assert_close(
            made["pixel_values"], expected["pixel_values"], atol=1e-6, rtol=0
        )
        assert [list(family.grid(image.header))] == expected["grids"]
        grids.add(family.grid(image.header))
    assert len(grids) > 8


def test_vllm_gets_each_part_in_a_row(folder: Path) -> None:
    family = known(folder)
    image = DecodedImage(np.random.default_rng(9).integers(0, 256, (50, 230, 3), np.uint8))
    made = family.model_inputs(processed(family, image))
    theirs = ENTRY.engine.encoder_inputs["vllm"](family, made)
    assert theirs["use_vit_merger"].tolist() == [[True]]
    sizes = theirs["tgt_sizes"][0]
    assert torch.equal(sizes, made["target_sizes"].long())
    assert len(sizes) > 2
    assert len({*map(tuple, sizes.tolist())}) > 1, "no part would have to be filled up"
    start = 0
    for row, (height, width) in zip(theirs["pixel_values"][0], sizes.tolist(), strict=True):
        end = start + height * width * PATCH
        length = end - start
        assert torch.equal(row[..., :length], made["pixel_values"][0, ..., start:end])
        assert not row[..., length:].any()
        start = end
    assert start == made["pixel_values"].shape[-1]


@given(st.integers(1, 900), st.integers(1, 900), st.integers(1, 12))
@example(900, 1, 9)
@example(1, 900, 9)
@example(SIDE, SIDE, 9)
@examples(300, storm=5000)
def test_parts_of_an_image_of_any_size(width: int, height: int, max_slices: int) -> None:
    family = MiniCpmFamily(
        image=MediaTokens(1, 1),
        side=SIDE,
        max_slices=max_slices,
        patch_side=PATCH,
        merges_early=True,
        around_number=("<n>", "</n>"),
        around_whole=("<i>", "</i>"),
        around_slice=("<s>", "</s>"),
        resampling=Resampling(BICUBIC),
        normalization=Normalization(rescale_factor=1 / 255, mean=HALF, std=HALF),
    )
    processor, size = MiniCPMV4_6ImageProcessorPil(), (height, width)
    grid = processor.get_sliced_grid(size, max_slices, SIDE)
    assert family.grid(ImageHeader(width, height)) == tuple(grid or (0, 0))
    fit: dict[str, Any] = {
        "scale_resolution": SIDE,
        "patch_size": PATCH,
        "downsample_mode": "16x",
    }
    sizes = [processor.find_best_resize(size, **fit, allow_upscale=grid is None)]
    if grid is not None:
        refined = processor.get_refine_size(size, grid, **fit, allow_upscale=True)
        part = refined[0] // grid[0], refined[1] // grid[1]
        canvas = np.zeros((3, *refined), np.uint8)
        sizes += [each.shape[1:] for each in divide_to_patches(canvas, part)]
    tokens = [high * wide // PATCH**2 // 16 for high, wide in sizes]
    plan = family.plan(ImageHeader(width, height))
    assert [piece for piece in plan.prompt if isinstance(piece, int)] == tokens
    assert plan.specs["target_sizes"].shape == (len(sizes), 2)
    num_patches = sum(high * wide for high, wide in sizes) // PATCH
    assert plan.specs["pixel_values"].shape == (1, 3, PATCH, num_patches)
    rows, columns = grid or (0, 0)
    lines = [["<s>*</s>"] * columns] * rows
    written = "".join("*" if isinstance(p, int) else p for p in numbered(plan.prompt, 12))
    assert written == "<n>12</n><i>*</i>" + "\n".join("".join(line) for line in lines)


def test_fewer_slices_for_fewer_pixels(folder: Path) -> None:
    family = known(folder)
    assert family.bounded((MAX_SLICES + 1) * SIDE**2) is family
    parts = {
        most: family.bounded(most * SIDE**2).plan(ImageHeader(300, 200)).specs["target_sizes"]
        for most in range(1, MAX_SLICES + 2)
    }
    assert [parts[most].shape[0] for most in parts] == [1, 1, 3, 3, 5, 5, 7]


def test_own_processor_keeps_to_fewer_slices(folder: Path) -> None:
    bounded = describe(folder, reference=True).bounded(3 * SIDE**2)
    image = DecodedImage(np.random.default_rng(3).integers(0, 256, (200, 300, 3), np.uint8))
    plan = bounded.plan(image.header)
    assert plan is not None
    assert plan.specs["target_sizes"].shape == (3, 2)
    out = {name: np.zeros(s.shape, s.dtype) for name, s in plan.specs.items()}
    bounded.process(image, out)
    assert out["pixel_values"].all()


def test_items_of_a_prompt_are_numbered(folder: Path) -> None:
    """Also where messages lie between them; a prompt is not computed in parts then."""
    builder = PromptBuilder(folder, known(folder))
    image = MediaPart(Modality.IMAGE, "")
    messages = [
        Message("user", (image, TextPart("and"), image)),
        Message("assistant", (TextPart("two"),)),
        Message("user", (image,)),
    ]
    item = known(folder).plan(ImageHeader(40, 40)).prompt
    prompt = builder.build(messages, [item] * 3)
    text = builder.text_of(prompt.token_ids)
    assert [f"<image_id>{number}</image_id><image>" in text for number in range(4)] == [
        *[True] * 3,
        False,
    ]
    starts = [text.index(f"<image_id>{number}<") for number in range(3)]
    assert starts == sorted(starts)
    assert not builder.can_append


def test_reference_leaves_a_place_for_the_number(folder: Path) -> None:
    family = known(folder)
    tokenizer = read_tokenizer(folder)
    plan = family.plan(ImageHeader(100, 60))
    made = PromptTokens(folder, family).reference(
        Modality.IMAGE,
        {},
        plan.prompt,
        key=ContentKey(bytes(32)),
        handle=Handle(0, 0, 64, 1),
        expires_s=time.time() + 60,
        of=Of(),
    )
    assert made.is_numbered
    assert made.num_embeds == plan.num_embeds
    for number in (0, 7, 12):
        digits = tokenizer.encode(str(number), add_special_tokens=False).ids
        written = "".join(
            piece if isinstance(piece, str) else "<|image_pad|>" * piece
            for piece in numbered(plan.prompt, number)
        )
        expected = tokenizer.encode(written, add_special_tokens=False).ids
        assert made.token_ids(digits) == expected


def test_runs_of_a_prompt_with_several_numbers(folder: Path) -> None:
    tokens = PromptTokens(folder, known(folder))
    embed, slice_id = known(folder).image.embed, tokens.runs(Modality.IMAGE, ("<slice>",))[0][0]
    prompt = ("<slice><slice>\0\0<slice>", 2, "\0", 0, 3, 4)
    assert tokens.runs(Modality.IMAGE, prompt) == (
        *((slice_id, 2), NUMBER_RUN, NUMBER_RUN, (slice_id, 1)),
        *((embed, 2), NUMBER_RUN, (embed, 7)),
    )


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("preprocessor_config.json", {"slice_mode": False}),
        ("preprocessor_config.json", {"use_image_id": False}),
        ("preprocessor_config.json", {"downsample_mode": "4x"}),
        ("preprocessor_config.json", {"do_resize": False}),
        ("preprocessor_config.json", {"do_normalize": False, "do_rescale": False}),
        ("preprocessor_config.json", {"image_processor_type": "AnotherProcessor"}),
        ("tokenizer.json", {"added_tokens": []}),
    ],
)
def test_settings_that_are_not_done(file: str, changed: dict[str, Any], tmp_path: Path) -> None:
    families.make_minicpm(tmp_path)
    assert isinstance(describe(tmp_path), MiniCpmFamily)
    path = tmp_path / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    assert not isinstance(describe(tmp_path), MiniCpmFamily)


@pytest.mark.parametrize("name", CHECKS_OF_FAMILIES)
def test_family_keeps_its_promises(name: str, folder: Path) -> None:
    check_family(name, known(folder), sizes=[(64, 48), (33, 200), (250, 90), (1, 1)])


def test_built_in_engine_refuses_it(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match="not all layers"):
        Runner(folder, known(folder))
