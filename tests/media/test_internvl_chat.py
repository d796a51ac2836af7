"""InternVL in its own format: settings, tiles, colours and the plain text that marks an image."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast

from afferent.builtin.pipeline.prompt import check_folder
from afferent.engines.references import Of
from afferent.errors import ConfigError
from afferent.media.families.family import NO_TOKEN
from afferent.media.families.internvl_chat import InternVlChatFamily
from afferent.media.families.registry import describe, engine_facts
from afferent.media.families.tokenizer import read_tokenizer
from afferent.proxy.prompts import PromptTokens
from afferent.types import ContentKey, Handle, Modality
from tests.media.folders import decoded_images
from tests.vllm import internvl_chat_model

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    internvl_chat_model.make(tmp_path)
    return tmp_path


def known(folder: Path) -> InternVlChatFamily:
    family = describe(folder, resize_rule="torchvision")
    assert isinstance(family, InternVlChatFamily)
    return family


def changed(folder: Path, **settings: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    for name, value in settings.items():
        if value is None:
            del config[name]
        else:
            config[name] = value
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("use_thumbnail", [True, False])
def test_tiles_and_colours(folder: Path, use_thumbnail: bool) -> None:
    """By Pillow and torch, as the model's authors do it; vLLM's processor: make test-vllm."""
    changed(folder, use_thumbnail=use_thumbnail)
    family, numbers = known(folder), set()
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    for image in decoded_images(seed=4, count=60):
        columns, rows = family.grid(image.header.width, image.header.height)
        stretched = Image.fromarray(image.pixels).resize((28 * columns, 28 * rows))
        boxes = [(28 * x, 28 * y) for y in range(rows) for x in range(columns)]
        expected = [stretched.crop((x, y, x + 28, y + 28)) for x, y in boxes]
        if use_thumbnail and len(boxes) > 1:
            expected.append(Image.fromarray(image.pixels).resize((28, 28)))
        plan = family.plan(image.header)
        assert plan.prompt == ("<img>", 4 * len(expected), "</img>")
        out = {n: np.full(s.shape, 77, np.dtype(s.dtype)) for n, s in plan.specs.items()}
        family.process(image, out)
        whole = np.stack([np.asarray(tile).transpose(2, 0, 1) for tile in expected])
        assert np.array_equal(out["pixel_values"], whole)
        floats = (torch.from_numpy(whole).float() / 255 - mean) / std
        tensors = {name: torch.from_numpy(array) for name, array in out.items()}
        assert torch.equal(family.model_inputs(tensors)["pixel_values"], floats)
        given = family.processor_inputs(out, "fused")["pixel_values"]
        assert np.array_equal(given, floats.numpy())
        numbers.add(len(expected))
    assert len(numbers) > 3


def test_limit_of_pixels_leaves_fewer_tiles(folder: Path) -> None:
    family = known(folder)
    assert family.bounded(10**9) == family
    assert family.bounded(4 * 28 * 28).max_tiles == 3
    changed(folder, use_thumbnail=False)
    assert known(folder).bounded(4 * 28 * 28).max_tiles == 4


def test_without_dynamic_size_an_image_is_one_tile(folder: Path) -> None:
    changed(folder, dynamic_image_size=False)
    family = known(folder)
    assert {math.prod(family.grid(width, 100)) for width in range(10, 900, 50)} == {1}


def test_reference_has_the_tokens_of_the_text_that_marks_an_image(folder: Path) -> None:
    family, tokenizer = known(folder), read_tokenizer(folder)
    prompts = PromptTokens(folder, family)
    reference = prompts.reference(
        Modality.IMAGE,
        {},
        ("<img>", 8, "</img>"),
        key=ContentKey(bytes(32)),
        handle=Handle(0, 0, 0, 0),
        expires_s=0.0,
        of=Of(),
    )
    ids = {text: tokenizer.token_to_id(text) for text in ("<img>", "<IMG_CONTEXT>", "</img>")}
    assert len(reference.marker) > 1
    assert tokenizer.decode([*reference.marker]) == "<image>"
    assert reference.token_ids() == [ids["<img>"], *[ids["<IMG_CONTEXT>"]] * 8, ids["</img>"]]
    assert family.tokens[Modality.IMAGE].marker == NO_TOKEN
    assert not reference.has_own_tokenizer
    with pytest.raises(ConfigError, match="plain text, which only vLLM reads"):
        check_folder(folder, family)
    assert engine_facts("internvl_chat").compared_with["vllm"] == ("internvl_chat",)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_dynamic_patch": None},
        {"use_thumbnail": None},
        {"force_image_size": 56},
        {"downsample_ratio": "half"},
        {"vision_config": {"image_size": 0, "patch_size": 7}},
    ],
)
def test_settings_that_are_not_done(folder: Path, settings: dict[str, Any]) -> None:
    changed(folder, **settings)
    assert describe(folder) is None


def test_tokenizer_without_the_tokens_of_images(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<IMG_CONTEXT>", "<IMG_CONTENT>"))
    assert describe(folder) is None
    path.write_text("{")
    assert describe(folder) is None


def test_tokenizer_in_an_older_form_is_converted(folder: Path) -> None:
    """As released folders of InternVL 2.5 and 3 have it: a vocabulary and merges."""
    whole = PreTrainedTokenizerFast.from_pretrained(folder)
    state = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    added = whole.get_added_vocab()
    vocab = [token for token in state["vocab"] if token not in added]
    added = {token: len(vocab) + index for index, token in enumerate(added)}
    merges = [" ".join(pair) for pair in state["merges"]]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocab)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    decoder = {index: {"content": token, "special": True} for token, index in added.items()}
    settings = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    converted = read_tokenizer(folder)
    asked = "<|im_start|>user\n<image>\nWhat is in the picture?<|im_end|>"
    assert converted.encode(asked).tokens == whole.tokenize(asked)
    family = known(folder)
    assert family.image.embed == converted.token_to_id("<IMG_CONTEXT>")
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "auto_map": {"A": "b"}}))
    assert describe(folder) is None
    kind = {"tokenizer_class": "AutoModel"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **kind}))
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        read_tokenizer(folder)


def test_folder_without_any_tokenizer_is_forwarded(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert describe(folder) is None
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        read_tokenizer(folder)
