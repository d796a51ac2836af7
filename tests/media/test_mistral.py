"""Models in Mistral's own format: sizes, pixels by OpenCV, samples, and tokens."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from afferent.engines.references import Of
from afferent.errors import ConfigError, InvalidMedia
from afferent.media.decoded import DecodedAudio, DecodedImage
from afferent.media.families import mistral
from afferent.media.families.hub import find_model
from afferent.media.families.mistral import MistralAudio, MistralImages
from afferent.media.families.registry import AnyFamily, describe
from afferent.media.headers.probe import AudioHeader, ImageHeader
from afferent.proxy.prompts import PromptTokens
from afferent.types import ContentKey, Handle, Modality
from tests.media.folders import decoded_images, make_qwen
from tests.vllm.mistral_models import make_mistral3, make_pixtral, make_voxtral

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def known(folder: Path) -> AnyFamily:
    family = describe(folder, mistral.config_of(folder))
    assert family is not None
    return family


def made(family: AnyFamily, media: DecodedImage | DecodedAudio) -> np.ndarray[Any, Any]:
    plan = family.plan(media.header)
    assert plan is not None
    out = {n: np.full(s.shape, 77, np.dtype(s.dtype)) for n, s in plan.specs.items()}
    family.process(media, out)
    ((array,),) = out.values()
    return array


@pytest.mark.parametrize(("make", "side"), [(make_pixtral, 14), (make_mistral3, 28)])
def test_images_by_opencv(make: Any, side: int, tmp_path: Path) -> None:
    """vLLM's own processor: make test-vllm-families."""
    make(tmp_path)
    family = known(tmp_path)
    assert isinstance(family, MistralImages)
    assert family.resizing("torchvision") is family
    family.load()
    for image in decoded_images(seed=6, count=40):
        pixels = made(family, image)
        height, width = pixels.shape[1:]
        floats = image.pixels.astype(np.float32)
        resized = cv2.resize(floats, (width, height), interpolation=cv2.INTER_CUBIC)
        normal = (resized / np.float32(255) - np.float32(MEAN)) / np.float32(STD)
        assert np.array_equal(pixels, normal.transpose(2, 0, 1))
        plan = family.plan(image.header)
        rows, columns = height // side, width // side
        assert plan.prompt == (columns, "[IMG_BREAK]") * (rows - 1) + (columns, "[IMG_END]")
        assert max(width, height) <= 112


@pytest.mark.parametrize(
    ("width", "height", "columns", "rows"),
    [(1, 1, 1, 1), (14, 15, 1, 2), (112, 113, 8, 8), (1000, 2, 8, 1), (225, 112, 8, 4)],
)
def test_sizes_of_images(width: int, height: int, columns: int, rows: int, tmp_path: Path) -> None:
    make_pixtral(tmp_path)
    plan = known(tmp_path).plan(ImageHeader(width, height))
    assert plan is not None
    assert plan.specs["images"].shape == (1, 3, 14 * rows, 14 * columns)


def test_tokens_of_an_image(tmp_path: Path) -> None:
    """Their ids are those of the format, not those of the files of `transformers` beside it."""
    make_pixtral(tmp_path)
    family = known(tmp_path)
    plan = family.plan(ImageHeader(28, 28))
    assert plan is not None
    prompts = PromptTokens(tmp_path, family)
    assert prompts.runs(Modality.IMAGE, plan.prompt) == ((10, 2), (12, 1), (10, 2), (13, 1))
    reference = prompts.reference(
        *(Modality.IMAGE, {}, plan.prompt),
        key=ContentKey(bytes(32)),
        handle=Handle(0, 0, 0, 0),
        expires_s=0.0,
        of=Of(),
    )
    assert reference.has_own_tokenizer


def test_samples_of_whole_chunks(tmp_path: Path) -> None:
    make_voxtral(tmp_path)
    family = known(tmp_path)
    assert isinstance(family, MistralAudio)
    assert family.sample_rate_hz == 16_000
    rng = np.random.default_rng(1)
    for length, chunks in ((1, 1), (32_000, 1), (32_001, 2)):
        samples = rng.normal(0, 0.3, length).astype(np.float32)
        array = made(family, DecodedAudio(samples, 16_000))
        assert array.shape == (32_000 * chunks,)
        assert np.array_equal(array[:length], samples)
        assert not array[length:].any()
        plan = family.plan(AudioHeader(16_000, 1, length))
        assert plan.prompt == ("[BEGIN_AUDIO]", 25 * chunks)
        runs = PromptTokens(tmp_path, family).runs(Modality.AUDIO, plan.prompt)
        assert runs == ((21, 1), (20, 25 * chunks))
    with pytest.raises(InvalidMedia, match="too short"):
        family.plan(AudioHeader(16_000, 1, 0))


def test_only_folders_with_its_weights_have_the_format(tmp_path: Path) -> None:
    make_mistral3(tmp_path)
    assert mistral.weights(tmp_path) == [tmp_path / "consolidated.safetensors"]
    assert mistral.digested_files(tmp_path)[0] == tmp_path / "params.json"
    assert find_model(str(tmp_path), needs_weights=True) == tmp_path.resolve()
    (tmp_path / "consolidated.safetensors").unlink()
    assert mistral.config_of(tmp_path) is None
    with pytest.raises(ConfigError, match=r"config\.json can't be read"):
        describe(tmp_path)
    (other := tmp_path / "other").mkdir()
    make_qwen(other)
    assert mistral.config_of(other) is None


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (make_pixtral, {"image": None}),
        (make_pixtral, {"special_tokens": [{"rank": 3, "token_str": "[IMG]"}]}),
        (make_voxtral, {"audio": None}),
        (make_voxtral, {"special_tokens": None}),
        (make_voxtral, {"audio": {"chunk_length_s": None}}),
        (make_voxtral, {"audio": {"transcription_format": "streaming"}}),
        (make_voxtral, {"audio": {"frame_rate": 12.0}}),
        (make_voxtral, {"audio": {"frame_rate": 0}}),
        (make_pixtral, {"image": {"image_patch_size": 0}}),
        (make_pixtral, {"image": {"image_patch_size": "14"}}),
    ],
)
def test_settings_that_are_not_done(make: Any, change: dict[str, Any], tmp_path: Path) -> None:
    make(tmp_path)
    path = tmp_path / "tekken.json"
    tekken = json.loads(path.read_text())
    for name, value in change.items():
        tekken[name] = {**tekken[name], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(tekken))
    assert describe(tmp_path, mistral.config_of(tmp_path)) is None
    path.unlink()
    assert describe(tmp_path, mistral.config_of(tmp_path)) is None


def test_sections_of_other_media_may_have_any_form(tmp_path: Path) -> None:
    make_voxtral(tmp_path)
    path = tmp_path / "tekken.json"
    tekken = json.loads(path.read_text())
    tekken["special_tokens"].append({"rank": 30, "token_str": None})
    path.write_text(json.dumps({**tekken, "image": {"patch": 1.5}}))
    assert isinstance(known(tmp_path), MistralAudio)


@pytest.mark.parametrize(
    ("params", "model_type"),
    [
        ({"multimodal": 5}, ""),
        ({"multimodal": "whisper_model_args"}, ""),
        ({"vision_encoder": False}, ""),
        ({"model_type": "transformer", "vision_encoder": {"a": 1}}, mistral.PIXTRAL),
    ],
)
def test_types_of_configurations(params: dict[str, Any], model_type: str, tmp_path: Path) -> None:
    make_voxtral(tmp_path)
    (tmp_path / "params.json").write_text(json.dumps(params))
    config = mistral.config_of(tmp_path)
    assert config is not None
    assert config["model_type"] == model_type
    if not model_type:
        assert describe(tmp_path, config) is None


def test_without_opencv_images_go_as_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_pixtral(tmp_path)
    monkeypatch.setitem(sys.modules, "cv2", None)
    mistral._opencv.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert describe(tmp_path, mistral.config_of(tmp_path)) is None
    assert "install OpenCV with 'afferent-mm[mistral]'" in caplog.text
    mistral._opencv.cache_clear()
