"""Qwen2.5-Omni and Qwen3-Omni against the processors of `transformers`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, WhisperFeatureExtractor

from afferent.builtin.engine.model.runner import Runner
from afferent.conformance import CHECKS_OF_FAMILIES, check_family
from afferent.errors import ConfigError, InvalidMedia, UnsupportedMedia, UnsupportedModel
from afferent.media.decoded import Array, DecodedAudio, Media
from afferent.media.families.family import longest_prompt, read_json
from afferent.media.families.omni import OmniFamily
from afferent.media.families.registry import describe
from afferent.media.headers.probe import AudioHeader, VideoHeader
from afferent.types import Modality
from tests.engine import families
from tests.media.folders import decoded_images

MAKERS: dict[str, Callable[[Path], None]] = {
    "qwen2_5_omni": families.make_qwen2_5_omni,
    "qwen3_omni": families.make_qwen3_omni,
}
LENGTHS = (
    1,
    159,
    160,
    161,
    399,
    400,
    1_600,
    15_999,
    16_000,
    16_001,
    63_999,
    64_000,
    64_001,
    90_123,
)
"""In samples; the processor's own length is 64,000."""
HOP = 160


@pytest.fixture(scope="module", params=MAKERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    made = tmp_path_factory.mktemp("model")
    MAKERS[request.param](made)
    return made


def known(folder: Path) -> OmniFamily:
    family = describe(folder)
    assert isinstance(family, OmniFamily)
    return family


def process(family: OmniFamily, media: Media) -> dict[str, Array]:
    specs = family.plan(media.header).specs
    out = {name: np.full(s.shape, 77, np.dtype(s.dtype)) for name, s in specs.items()}
    family.process(media, out)
    return out


def theirs(family: OmniFamily, folder: Path, samples: Any) -> tuple[Any, int]:
    """Return the spectra and their number, by the extractor with the processor's arguments."""
    extract = WhisperFeatureExtractor.from_pretrained(folder)
    options: dict[str, Any] = {"padding": "max_length"}
    if family.encoder == "qwen3":
        samples = np.pad(samples, (0, -len(samples) % HOP))
        options = {"padding": True}
    made = extract(
        samples,
        sampling_rate=16_000,
        truncation=False,
        return_attention_mask=True,
        return_tensors="np",
        **options,
    )
    count = int(made["attention_mask"].sum())
    return made["input_features"][:, :, :count], count


def num_embeds(family: OmniFamily, count: int) -> int:
    """Return the embeddings of a clip by the formulas in the processors' files."""
    if family.encoder == "qwen2_5":
        return ((count - 1) // 2 + 1 - 2) // 2 + 1
    feat = (count % 100 - 1) // 2 + 1
    return ((feat - 1) // 2 + 1 - 1) // 2 + 1 + (count // 100) * 13


def test_spectra_are_those_of_the_processor(folder: Path) -> None:
    family = known(folder)
    rng = np.random.default_rng(3)
    for length in LENGTHS:
        samples = rng.normal(0, 0.1, length).astype(np.float32)
        clip = DecodedAudio(samples, 16_000)
        try:
            expected, count = theirs(family, folder, samples)
        except RuntimeError:  # too short to be mirrored at its end
            assert length <= HOP
            count = 0
        if num_embeds(family, count) < 1:
            with pytest.raises(InvalidMedia, match="short"):
                family.plan(clip.header)
            continue
        assert family.plan(clip.header).prompt == (num_embeds(family, count),)
        features = process(family, clip)
        assert features["audio_feature_lengths"].tolist() == [count]
        np.testing.assert_allclose(features["input_features"], expected, rtol=0, atol=2e-5)
        ready = family.model_inputs({n: torch.from_numpy(each) for n, each in features.items()})
        assert ready["feature_attention_mask"].tolist() == [[1] * count]


def test_a_clip_whose_end_is_its_loudest(folder: Path) -> None:
    """Values are relative to the loudest spectrum, also one that is not a part of the features."""
    family = known(folder)
    samples = np.full(16_000 - 40, 1e-4, np.float32)
    samples[-1] = 0.9
    expected, _ = theirs(family, folder, samples)
    features = process(family, DecodedAudio(samples, 16_000))
    np.testing.assert_allclose(features["input_features"], expected, rtol=0, atol=2e-5)


def test_images_are_those_of_the_processor(folder: Path) -> None:
    family, processor = known(folder), AutoImageProcessor.from_pretrained(folder)
    for image in decoded_images(seed=8, count=40):
        expected = processor(images=Image.fromarray(image.pixels), return_tensors="np")
        features = process(family, image)
        ready = family.model_inputs({n: torch.from_numpy(each) for n, each in features.items()})
        assert (features["image_grid_thw"] == expected["image_grid_thw"]).all()
        np.testing.assert_allclose(
            ready["pixel_values"].numpy(), expected["pixel_values"], rtol=1e-6, atol=1e-6
        )


def test_no_videos(folder: Path) -> None:
    family = known(folder)
    assert set(family.tokens) == {Modality.IMAGE, Modality.AUDIO}
    assert family.sample_rate_hz == 16_000
    with pytest.raises(UnsupportedMedia):
        family.plan(VideoHeader(60, 40, num_frames=30, frames_per_s=10.0))


@pytest.mark.parametrize("name", CHECKS_OF_FAMILIES)
def test_family_keeps_its_promises(name: str, folder: Path) -> None:
    check_family(name, known(folder), sizes=[(64, 48), (33, 200), (250, 90)])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("preprocessor_config.json", {"do_resize": False}),
        ("preprocessor_config.json", {"feature_size": 80}),
        ("preprocessor_config.json", {"image_processor_type": "AnotherProcessor"}),
    ],
)
def test_settings_that_are_not_done(
    make: Callable[[Path], None], file: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    make(tmp_path)
    assert describe(tmp_path) is not None
    path = tmp_path / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    assert describe(tmp_path) is None


def test_another_window_of_the_encoder(tmp_path: Path) -> None:
    families.make_qwen3_omni(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["thinker_config"]["audio_config"]["n_window"] = 25
    path.write_text(json.dumps(config))
    assert describe(tmp_path) is None


def test_a_clip_of_another_medium(folder: Path) -> None:
    family = known(folder)
    assert family.plan(AudioHeader(8_000, 1, 8_000)) == family.plan(AudioHeader(16_000, 2, 16_000))


def test_longest_prompt_is_the_thinkers(folder: Path) -> None:
    assert longest_prompt(read_json(folder / "config.json")) == 2048


def test_built_in_engine_refuses_them(folder: Path) -> None:
    with pytest.raises((ConfigError, UnsupportedModel)):
        Runner(folder, known(folder))
