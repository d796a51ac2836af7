"""The native families against the image processors of `transformers`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

import afferent
from afferent.conformance.images import draw_image
from afferent.errors import ConfigError, InvalidMedia, UnsupportedMedia
from afferent.media import native as native_module
from afferent.media.decoded import Array, DecodedAudio, DecodedImage
from afferent.media.families.adapter import AdapterFamily
from afferent.media.families.entry import EngineFacts
from afferent.media.families.fixed import FixedFamily
from afferent.media.families.native import ENTRIES
from afferent.media.families.plan import FeaturePlan
from afferent.media.families.qwen_vl import QwenVlFamily
from afferent.media.families.registry import (
    POSITION_FEATURES,
    AnyFamily,
    describe,
    engine_facts,
    fingerprint,
)
from afferent.media.headers.probe import AudioHeader, ImageHeader, VideoHeader
from afferent.media.transforms.normalize import Normalization
from afferent.media.workers.jobs import PLAN_NBYTES, Planned
from afferent.types import Modality, encode
from tests.examples import examples
from tests.media.folders import (
    decoded_images,
    draw_pixels,
    make_gemma3,
    make_glm,
    make_llava,
    make_qwen,
    make_tokenizer,
    write_config,
)

SHAPES = Path(afferent.__file__).parent / "builtin" / "models" / "shapes"
Native = QwenVlFamily | FixedFamily
EDGES = {"shortest_edge": 56 * 56, "longest_edge": 160 * 160}
TWICE = {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 160 * 160}
SMALL = {"height": 64, "width": 64}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}

FOLDERS: dict[str, Callable[[Path], None]] = {
    "qwen2_vl": lambda folder: make_qwen(folder, size=EDGES),
    "qwen2_5_vl": lambda folder: make_qwen(
        folder, "qwen2_5_vl", min_pixels=784, max_pixels=20_000, resample=2
    ),
    "qwen3_vl": lambda folder: make_qwen(
        folder, "qwen3_vl", size=EDGES, patch_size=16, temporal_patch_size=2, **HALF
    ),
    "qwen3_vl_moe": lambda folder: make_qwen(
        folder, "qwen3_vl_moe", size=EDGES, patch_size=16, resample=2, **HALF
    ),
    "glm4v": lambda folder: make_glm(folder, size=TWICE),
    "glm4v_moe": lambda folder: make_glm(folder, "glm4v_moe", size=TWICE, patch_size=16),
    "not rescaled": lambda folder: make_qwen(folder, size=EDGES, do_rescale=False),
    "not normalized": lambda folder: make_qwen(folder, size=EDGES, do_normalize=False),
    "clip": lambda folder: make_llava(
        folder, size={"shortest_edge": 60}, crop_size={"height": 56, "width": 57}
    ),
    "siglip": lambda folder: make_llava(
        folder, siglip=True, size=SMALL, num_additional=0, strategy="full"
    ),
    "gemma3": lambda folder: make_gemma3(folder, size=SMALL),
}


FAMILIES: dict[str, Native] = {}
"""Filled once by a fixture, because Hypothesis can't use fixtures for each test."""


@pytest.fixture(scope="module", autouse=True)
def families(tmp_path_factory: pytest.TempPathFactory) -> None:
    torch.set_num_threads(1)  # with small tensors, more threads only wait for each other
    for name in ("qwen2_vl", "qwen3_vl", "clip", "gemma3"):
        FOLDERS[name](made := tmp_path_factory.mktemp("model"))
        FAMILIES[name] = native(made)


@pytest.fixture(scope="module", params=FOLDERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    FOLDERS[request.param](made)
    return made


def native(folder: Path) -> Native:
    family = describe(folder)
    assert isinstance(family, Native)
    return family


def test_the_guide_to_engines_has_the_features(folder: Path) -> None:
    """The guide has the names, types and dimensions of all features."""
    family = native(folder)
    headers = [ImageHeader(300, 200), VideoHeader(300, 200, num_frames=30, frames_per_s=10.0)]
    page = (Path(__file__).parents[2] / "docs" / "writing-an-engine.md").read_text()
    for header in headers[: len(family.tokens)]:
        for name, spec in family.plan(header).specs.items():
            shapes = re.findall(rf"`{name}` {spec.dtype} \(([^)]*)\)", page)
            ranks = {len([side for side in shape.split(",") if side]) for shape in shapes}
            assert len(spec.shape) in ranks, name


def process(family: AnyFamily, image: DecodedImage) -> dict[str, Array]:
    """Return the features, in arrays of the planned size."""
    plan = family.plan(image.header)
    assert plan is not None
    out = {name: np.full(s.shape, 77, np.dtype(s.dtype)) for name, s in plan.specs.items()}
    family.process(image, out)
    return out


def inputs(family: AnyFamily, features: dict[str, Array]) -> dict[str, Array]:
    tensors = {name: torch.from_numpy(array) for name, array in features.items()}
    return {name: tensor.numpy() for name, tensor in family.model_inputs(tensors).items()}


def colours_last(family: Native, values: Array) -> Array:
    """Return the values with the channels as the last dimension, and without repeated frames."""
    if isinstance(family, QwenVlFamily):
        split = values.reshape(len(values), 3, -1, family.patch_size**2)
        assert (split == split[:, :, :1]).all()
        return split[:, :, 0].transpose(0, 2, 1)
    return values.transpose(0, 2, 3, 1)


def in_bytes(values: Array, normalization: Normalization) -> Array:
    n = normalization
    return (values * np.array(n.std) + np.array(n.mean)) / n.rescale_factor


def test_two_hundred_images(folder: Path) -> None:
    family, reference = native(folder), describe(folder, reference=True)
    assert isinstance(reference, AdapterFamily)
    processor = AutoImageProcessor.from_pretrained(folder)
    num_far = num_values = 0
    for image in decoded_images(seed=1, count=200):
        expected = processor(images=Image.fromarray(image.pixels), return_tensors="np")
        assert_equal(process(reference, image), expected)
        features = process(family, image)
        normalization = (
            family.normalization
            if isinstance(family, QwenVlFamily)
            else family.framing.normalization
        )
        theirs = in_bytes(colours_last(family, expected["pixel_values"]), normalization)
        ours = colours_last(family, features["pixel_values"]).astype(np.int16)
        apart = np.abs(ours - np.rint(theirs))
        assert np.abs(theirs - np.rint(theirs)).max() < 0.01
        assert apart.max() <= (2 if native_module.compiled is None else 0)
        num_values, num_far = num_values + apart.size, num_far + np.count_nonzero(apart > 1)
        ready = inputs(family, features)
        assert {n: (a.dtype, a.shape) for n, a in ready.items()} == {
            n: (a.dtype, a.shape) for n, a in expected.items() if n in ready
        }
        error = np.abs(ready["pixel_values"] - expected["pixel_values"]).max()
        assert error <= 2.01 * normalization.rescale_factor / min(normalization.std)
        if isinstance(family, QwenVlFamily):
            assert (ready["image_grid_thw"] == expected["image_grid_thw"]).all()
            num_patches = processor.get_number_of_image_patches(*image.pixels.shape[:2])
            num_embeds = num_patches // processor.merge_size**2
            assert family.plan(image.header).prompt == (num_embeds,)
    assert num_far <= 1e-4 * num_values


def assert_equal(features: dict[str, Array], expected: Any) -> None:
    for name, array in features.items():
        assert array.dtype == expected[name].dtype
        np.testing.assert_array_equal(array, expected[name])


def test_an_image_that_needs_no_resizing(folder: Path) -> None:
    """Without resizing, only the rounding of floats may differ."""
    family = native(folder)
    size = (64, 64) if isinstance(family, FixedFamily) else (224, 56)
    if isinstance(family, QwenVlFamily) and family.patch_size == 16:
        size = (192, 64)
    if isinstance(family, FixedFamily) and family.framing.shortest_edge:
        size = (60, 83)
    image = DecodedImage(draw_pixels(np.random.default_rng(3), *size, kind=1))
    processor = AutoImageProcessor.from_pretrained(folder)
    expected = processor(images=Image.fromarray(image.pixels), return_tensors="np")
    ready = inputs(family, process(family, image))
    np.testing.assert_allclose(
        ready["pixel_values"], expected["pixel_values"], rtol=1e-6, atol=1e-6
    )


def test_no_more_pixels_than_are_wanted(folder: Path) -> None:
    """The processor with the same limit gives the same features; a fixed size does not change."""
    family, reference, most = native(folder), describe(folder, reference=True), 9_000
    assert isinstance(reference, AdapterFamily)
    bounded, bounded_reference = family.bounded(most), reference.bounded(most)
    if isinstance(family, FixedFamily):
        assert bounded is family
        assert bounded_reference is reference
        return
    assert family.bounded(10**9) is family
    assert isinstance(bounded, QwenVlFamily)
    edges = {"shortest_edge": bounded.min_pixels, "longest_edge": bounded.max_pixels}
    processor = AutoImageProcessor.from_pretrained(folder, size=edges)
    for image in decoded_images(seed=5, count=20):
        expected = processor(images=Image.fromarray(image.pixels), return_tensors="np")
        assert_equal(process(bounded_reference, image), expected)
        ready = inputs(bounded, process(bounded, image))
        assert (ready["image_grid_thw"] == expected["image_grid_thw"]).all()
        _, rows, columns = expected["image_grid_thw"][0]
        if min(rows, columns) > family.merge_size:  # not for very narrow images
            assert rows * columns * family.patch_size**2 <= most
        error = np.abs(ready["pixel_values"] - expected["pixel_values"]).max()
        n = family.normalization
        assert error <= 2.01 * n.rescale_factor / min(n.std)


@given(st.integers(2, 700), st.integers(2, 700))
@examples(60, storm=600)
@pytest.mark.parametrize("name", ["qwen3_vl", "clip", "gemma3"])
def test_plans_are_exact(name: str, width: int, height: int) -> None:
    family = FAMILIES[name]
    image = DecodedImage(np.full((height, width, 3), 200, np.uint8))
    try:
        planned = family.plan(image.header)
    except InvalidMedia:
        assert isinstance(family, QwenVlFamily)
        assert max(width, height) > 200 * min(width, height)
        return
    features = process(family, image)
    if "image_grid_thw" in features:
        _, rows, columns = features["image_grid_thw"][0].tolist()
        assert rows * columns == len(features["pixel_values"])
        assert planned.prompt == (rows * columns // 4,)
    # Every byte was written: an image of one colour has only that colour.
    assert (features["pixel_values"] == 200).all()


@given(st.integers(2, 16_384), st.integers(2, 16_384))
@examples(200, storm=2000)
def test_resized_size(width: int, height: int) -> None:
    family = FAMILIES["qwen2_vl"]
    assert isinstance(family, QwenVlFamily)
    fewest, most = family.min_pixels, family.max_pixels
    try:
        expected = smart_resize(height, width, 28, fewest, most)
    except ValueError:
        with pytest.raises(InvalidMedia):
            family.resized(width, height)
        return
    assert family.resized(width, height) == expected[::-1]


@pytest.mark.parametrize("name", ["clip", "siglip", "gemma3"])
@pytest.mark.parametrize("strategy", ["default", "full"])
def test_prompts_of_fixed_sizes(name: str, strategy: str, tmp_path: Path) -> None:
    if name == "gemma3":
        make_gemma3(tmp_path, image_seq_length=16 if strategy == "full" else 9)
    else:
        make_llava(tmp_path, siglip=name == "siglip", strategy=strategy)
    family = native(tmp_path)
    tokens = family.tokens[Modality.IMAGE]
    processor = AutoProcessor.from_pretrained(tmp_path)
    text = processor.tokenizer.convert_ids_to_tokens
    marker, embed = text(tokens.marker), text(tokens.embed)
    prompt = family.plan(ImageHeader(100, 50)).prompt
    expanded = "".join(piece if isinstance(piece, str) else embed * piece for piece in prompt)
    made = processor(text=f"Look: {marker}!", images=Image.new("RGB", (100, 50)))
    assert made["input_ids"][0] == processor.tokenizer(f"Look: {expanded}!")["input_ids"]


def test_the_built_in_model(tmp_path: Path) -> None:
    family = native(SHAPES)
    rng = np.random.default_rng(0)
    for width, height in rng.integers(20, 5000, (300, 2)).tolist():
        if max(width, height) <= 36 * min(width, height):
            assert family.plan(ImageHeader(width, height)).num_embeds <= 36


def test_the_same_greedy_tokens() -> None:
    """uint8 features and the processor's floats give the same answers of the built-in model."""
    family, reference = native(SHAPES), describe(SHAPES, reference=True)
    assert reference is not None
    model = Qwen2VLForConditionalGeneration.from_pretrained(SHAPES).eval()
    tokenizer = AutoTokenizer.from_pretrained(SHAPES)
    parts = [{"type": "image"}, {"type": "text", "text": "What is in the picture?"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    rng = np.random.default_rng(5)
    num_right = 0
    for _ in range(20):
        drawn = draw_image(rng)
        image = DecodedImage(np.asarray(drawn.image))
        planned = family.plan(image.header)
        ids: list[int] = []
        for token in tokenizer(text)["input_ids"]:
            ids += [token] * (planned.num_embeds if token == family.image.marker else 1)
        answers = [
            generate(
                model, each, family.image.embed, inputs(each_family, process(each_family, image))
            )
            for each, each_family in ((ids, family), (ids, reference))
        ]
        assert answers[0] == answers[1]
        num_right += tokenizer.decode(answers[0], skip_special_tokens=True).strip() == drawn.answer
    assert num_right >= 18


def generate(
    model: Any, ids: list[int], image_token_id: int, features: dict[str, Array]
) -> list[int]:
    tensor = torch.tensor([ids])
    with torch.inference_mode():
        out = model.generate(
            input_ids=tensor,
            attention_mask=torch.ones_like(tensor),
            mm_token_type_ids=(tensor == image_token_id).long(),
            **{name: torch.from_numpy(array) for name, array in features.items()},
            max_new_tokens=12,
            do_sample=False,
        )
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


def test_settings_that_only_the_processor_itself_follows(tmp_path: Path) -> None:
    def known(make: Callable[..., None], **settings: Any) -> bool:
        make(tmp_path, **settings)
        found = describe(tmp_path) is not None
        assert (describe(tmp_path, reference=True) is not None) == found
        for path in tmp_path.iterdir():
            path.unlink()
        return found

    neither = {"do_rescale": False, "do_normalize": False}
    assert known(make_qwen, resample=4)
    assert not known(make_qwen, do_resize=False)
    assert not known(make_qwen, **neither)
    assert known(make_llava)
    assert not known(make_llava, **neither)
    assert not known(make_llava, size={"shortest_edge": 100})
    assert not known(make_llava, do_center_crop=False)
    assert not known(make_llava, size={"shortest_edge": 224, "longest_edge": 300})
    assert known(make_gemma3)
    assert not known(make_gemma3, do_pan_and_scan=True)
    assert not known(make_gemma3, do_resize=False)


@pytest.mark.parametrize(
    "settings",
    [
        {"image_processor_type": "SomethingElse"},
        {"image_processor_type": "Qwen2VLImageProcessor", "auto_map": {}},
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": "large"},
        {},
    ],
)
def test_processors_that_nobody_knows(settings: dict[str, Any], tmp_path: Path) -> None:
    make_qwen(tmp_path)
    (tmp_path / "preprocessor_config.json").write_bytes(msgspec.json.encode(settings))
    assert describe(tmp_path) is None


def test_old_names_and_forms_of_settings(tmp_path: Path) -> None:
    make_qwen(tmp_path)
    old = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "min_pixels": 3136,
        "max_pixels": 12_845_056,
        "size": {"min_pixels": 3136, "max_pixels": 12_845_056},
        "patch_size": None,
    }
    (tmp_path / "preprocessor_config.json").write_bytes(msgspec.json.encode(old))
    family = native(tmp_path)
    assert isinstance(family, QwenVlFamily)
    assert (family.min_pixels, family.max_pixels, family.patch_size) == (3136, 12_845_056, 14)
    make_llava(tmp_path)
    (tmp_path / "processor_config.json").write_bytes(msgspec.json.encode({"patch_size": 14}))
    old = {"image_processor_type": "CLIPImageProcessor", "size": 336, "crop_size": 336}
    (tmp_path / "preprocessor_config.json").write_bytes(msgspec.json.encode(old))
    family = native(tmp_path)
    assert isinstance(family, FixedFamily)
    assert family.plan(ImageHeader(9, 9)).num_embeds == 24 * 24
    assert (family.framing.width, family.framing.shortest_edge) == (336, 336)


def test_videos_of_qwen(tmp_path: Path) -> None:
    """The settings come from the video file or, as in `transformers`, from the image file."""
    make_qwen(tmp_path, "qwen3_vl", size=EDGES, patch_size=16)
    own = {"size": {"shortest_edge": 4096, "longest_edge": 9_000_000}, "fps": 4, "max_frames": 64}
    (tmp_path / "video_preprocessor_config.json").write_bytes(msgspec.json.encode(own))
    family = native(tmp_path)
    assert isinstance(family, QwenVlFamily)
    assert family.video is not None
    assert family.tokens[Modality.VIDEO].embed == 6
    settings = family.video.settings
    assert (settings.min_pixels, settings.max_pixels) == (4096, 9_000_000)
    assert (settings.fps, settings.max_frames, settings.patch_size) == (4.0, 64, 16)
    assert family.video.normalization.mean == (0.5, 0.5, 0.5)
    (tmp_path / "video_preprocessor_config.json").unlink()
    family = native(tmp_path)
    assert isinstance(family, QwenVlFamily)
    assert family.video is not None
    assert family.video.settings.max_pixels == EDGES["longest_edge"]


def test_the_servers_own_limit_of_frames(tmp_path: Path) -> None:
    """The server's limit can only lower the limit of the folder."""
    make_qwen(tmp_path, "qwen3_vl", size=EDGES, patch_size=16)
    own = {"size": {"shortest_edge": 4096, "longest_edge": 9_000_000}, "max_frames": 64}
    (tmp_path / "video_preprocessor_config.json").write_bytes(msgspec.json.encode(own))
    for asked, taken in [(16, 16), (64, 64), (65, 64), (768, 64)]:
        family = describe(tmp_path, max_sampled_frames=asked)
        assert isinstance(family, QwenVlFamily)
        assert family.video is not None
        assert family.video.settings.max_frames == taken
        over = describe(tmp_path, reference=True, max_sampled_frames=asked)
        assert isinstance(over, AdapterFamily)
        assert over.native == family


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_the_longest_video_has_a_plan_that_fits(model_type: str, tmp_path: Path) -> None:
    make_qwen(tmp_path, model_type)
    header = VideoHeader(1920, 1080, 36_000, 10.0)
    plan = native(tmp_path).plan(header)
    assert plan is not None
    assert len(encode(Planned(header, plan))) < PLAN_NBYTES // 2


def test_media_that_a_family_does_not_take(folder: Path) -> None:
    family = native(folder)
    audio = DecodedAudio(np.zeros(5, np.float32), 16_000)
    with pytest.raises(UnsupportedMedia):
        family.plan(AudioHeader(16_000, 1, 5))
    with pytest.raises(UnsupportedMedia):
        family.process(audio, {})
    if isinstance(family, FixedFamily):
        with pytest.raises(UnsupportedMedia):
            family.plan(VideoHeader(64, 64, 10, 2.0))
    assert family.sample_rate_hz == 0


def test_folders_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        describe(tmp_path)
    write_config(tmp_path, model_type="qwen2_vl")
    with pytest.raises(ConfigError, match="media"):
        describe(tmp_path)
    make_gemma3(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="token"):
        describe(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        describe(tmp_path)


def test_families_travel(folder: Path) -> None:
    for reference in (False, True):
        family = describe(folder, reference=reference)
        encoded = msgspec.msgpack.encode(family)
        assert msgspec.msgpack.decode(encoded, type=AnyFamily) == family
        assert isinstance(family, AnyFamily)
        family.load()


def test_the_fingerprint_follows_family_and_settings(tmp_path: Path) -> None:
    prints = set()
    for longest_edge in (28224, 28225):
        make_qwen(tmp_path, size={"shortest_edge": 3136, "longest_edge": longest_edge})
        for reference in (False, True):
            family = describe(tmp_path, reference=reference)
            assert family is not None
            prints.add(fingerprint(tmp_path, family))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    make_qwen(elsewhere, size={"shortest_edge": 3136, "longest_edge": 28225})
    again = describe(elsewhere, reference=True)
    assert again is not None
    prints.add(fingerprint(elsewhere, again))
    assert len(prints) == 4
    write_config(tmp_path, model_type="qwen2_vl")
    prints.add(fingerprint(tmp_path, again))
    assert len(prints) == 5


def test_what_engines_are_told() -> None:
    grids = {"image_grid_thw", "video_grid_thw", "second_per_grid_ts", "audio_feature_lengths"}
    assert grids == POSITION_FEATURES
    seeing_themselves = {
        model_type
        for entry in ENTRIES
        for model_type in entry.model_types
        if engine_facts(model_type).items_see_themselves
    }
    assert seeing_themselves == {"gemma3"}
    assert engine_facts("qwen3_vl").sharded_like == {"qwen3_vl_text": "qwen3"}
    assert engine_facts("nobody has heard of it") == EngineFacts()


def test_each_type_of_models_has_one_family() -> None:
    named = Counter(model_type for entry in ENTRIES for model_type in entry.model_types)
    assert set(named.values()) == {1}


def test_frontends_need_no_torch() -> None:
    code = (
        "import sys; from pathlib import Path; from afferent.media.workers import discover;"
        "from afferent.media.families import registry;"
        "from afferent.media.headers.probe import ImageHeader;"
        "folder = Path(sys.argv[1]);"
        "family = discover.family_of(folder, reference=sys.argv[2] == 'True');"
        "family.plan(ImageHeader(30, 40)); registry.fingerprint(folder, family);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    for reference in (False, True):
        command = [sys.executable, "-c", code, str(SHAPES), str(reference)]
        subprocess.run(command, check=True, timeout=60)


def test_plans_count_what_stands_in_the_prompt() -> None:
    plan = FeaturePlan({}, ("\n\n<a>", 4, "b", 2))
    assert plan.num_embeds == 6


def test_the_example_of_the_guide(tmp_path: Path) -> None:
    """The example gives the same features as the native family for such models."""
    page = (Path(__file__).parents[2] / "docs" / "adding-a-family.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": "square"}
    exec(code, names)  # noqa: S102
    make_gemma3(tmp_path, size=SMALL)
    image = DecodedImage(draw_pixels(np.random.default_rng(0), 90, 50, kind=1))
    theirs = process(native(tmp_path), image)
    path = tmp_path / "processor_config.json"
    path.write_text(
        re.sub(r'"Gemma3ImageProcessor\w*"', '"SquareImageProcessor"', path.read_text())
    )
    config = {"image_token_id": 5, "image_seq_length": 16}
    family = names["ENTRY"].describe(tmp_path, config)
    assert family.plan(image.header).prompt == ("<img>", 16, "</img>")
    ours = process(family, image)
    assert (ours["pixel_values"] == theirs["pixel_values"]).all()
    assert inputs(family, ours)["pixel_values"].dtype == np.float32


def test_a_family_of_another_version_is_refused_and_not_read_in_part() -> None:
    for family in get_args(AnyFamily):
        assert family.__struct_config__.forbid_unknown_fields, family
