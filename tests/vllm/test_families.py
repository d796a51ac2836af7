"""Each family that features are made for: as stock vLLM answers on the same folder."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from tests import models
from tests.engine import families
from tests.images import encoded, photo
from tests.server import Server
from tests.vllm.servers import Stock, python

pytestmark = pytest.mark.vllm

_HEAD_DIM = 32  # the least that vLLM's kernels for the CPU take


@pytest.fixture(autouse=True)
def _heads(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_size = families.TEXT["num_attention_heads"] * _HEAD_DIM
    monkeypatch.setitem(families.TEXT, "head_dim", _HEAD_DIM)
    monkeypatch.setitem(families.TEXT, "hidden_size", hidden_size)
    for generation in ("qwen2_5", "qwen3"):
        monkeypatch.setitem(families.QWEN[generation][2], "out_hidden_size", hidden_size)


def _rename_tower(folder: Path) -> None:
    """vLLM knows the tower's weights by the names that they had before transformers 5."""
    path = folder / "model.safetensors"
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model.")
        if "vision_tower." in name and "vision_model" not in name
        else name: tensor
        for name, tensor in load_file(path).items()
    }
    save_file(renamed, path, metadata={"format": "pt"})


def _llava(folder: Path) -> None:
    models.make_llava(folder, hidden_size=2 * _HEAD_DIM)
    _rename_tower(folder)


def _gemma3(folder: Path) -> None:
    families.make_gemma3(folder)
    _rename_tower(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "post_" in name:  # or a token would say itself again, whatever came before
            tensor.fill_(30.0)
    save_file(tensors, path, metadata={"format": "pt"})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["\n" * number for number in range(1, 5)])  # as Gemma's has
    tokenizer.save_pretrained(folder)


def _internvl(folder: Path) -> None:
    """With all that the whole processor asks for."""
    families.make_internvl(folder)
    processor = {"processor_class": "InternVLProcessor", "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    video = {"video_processor_type": "InternVLVideoProcessor", "size": {"height": 28, "width": 28}}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))


def _smolvlm(folder: Path) -> None:
    """With the package that its processor counts frames in words with."""
    done = subprocess.run([python(), "-c", "import num2words"], check=False, capture_output=True)
    if done.returncode:
        pytest.skip("vLLM's environment has no num2words, which SmolVLM's processor needs")
    families.make_smolvlm(folder)
    video = {"video_processor_type": "SmolVLMVideoProcessor"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))


def _renamed(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def renamed(folder: Path) -> None:
        make(folder)
        _rename_tower(folder)

    return renamed


MAKERS: dict[str, Callable[[Path], None]] = {
    "qwen2_5_vl": lambda folder: families.make_qwen_vl(folder, "qwen2_5"),
    "qwen3_vl": lambda folder: families.make_qwen_vl(folder, "qwen3"),
    "llava": _llava,
    "llava_next": _renamed(families.make_llava_next),
    "llava_onevision": _renamed(families.make_llava_onevision),
    "gemma3": _gemma3,
    "internvl": _internvl,
    "idefics3": families.make_idefics3,
    "smolvlm": _smolvlm,
    "pixtral": families.make_pixtral,
    "mistral3": families.make_mistral3,
}


def ask(number: int, seed: int) -> list[dict[str, Any]]:
    """Images of all sizes, which are made smaller or larger, by much or little; words between
    them, since stock vLLM can't render two of Gemma 3 that are side by side.
    """
    rng = np.random.default_rng(seed)
    asked = []
    for _ in range(number):
        shown = [
            photo(
                *(int(side) for side in rng.integers(24, 240, 2)), seed=int(rng.integers(1 << 30))
            )
            for _ in range(rng.integers(1, 3))
        ]
        parts: list[Any] = [
            {"type": "image_url", "image_url": {"url": _url(encoded(each, "PNG"))}}
            for each in shown
        ]
        body = {
            "model": "tiny",
            "messages": [
                {
                    "role": "user",
                    "content": [
                        each for part in parts for each in (part, {"type": "text", "text": "this"})
                    ],
                }
            ],
            "max_tokens": 12,
            "temperature": 0,
            "logprobs": True,
        }
        asked.append(body)
    return asked


@pytest.mark.parametrize("name", MAKERS)
def test_as_stock_answers(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    MAKERS[name](folder)
    asked = ask(8, 3)
    common = ("--served-model-name", "tiny", "--limit-mm-per-prompt", '{"image":4,"video":0}')
    with Stock(folder, *common, "--enable-scale-out") as stock:
        expected = [_answer(stock.url, each) for each in asked]
        rendered = [_rendered(stock.url, each) for each in asked]
    store_path, uds = tmp_path / "store.sock", tmp_path / "vllm.sock"
    front = ["--engine", "vllm", "--engine-url", f"unix:{uds}", "--store-path", str(store_path)]
    place = {"AFFERENT_STORE_PATH": str(store_path)}
    with (
        Stock(folder, *common, "--enable-scale-out", uds=uds, **place),
        Server(str(folder), *front) as server,
    ):
        found = [_answer(server.url, each) for each in asked]
        assert [_rendered(server.url, each) for each in asked] == rendered
        ways = {k: v for k, v in server.metrics().items() if "upstream_items" in k}
    assert list(ways) == ['afferent_upstream_items_total{modality="image",way="features"}']
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
    first = [each.logprobs[0] for each in expected]
    assert np.std(first) > 1e-3, "whatever the image is, the answer is the same"


def _url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


@dataclass(frozen=True, slots=True)
class _Answer:
    tokens: list[str]
    logprobs: list[float]


def _answer(url: str, body: dict[str, Any]) -> _Answer:
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    content = answer.json()["choices"][0]["logprobs"]["content"]
    return _Answer([each["token"] for each in content], [each["logprob"] for each in content])


def _rendered(url: str, body: dict[str, Any]) -> Any:
    """The prompt's tokens."""
    path = f"{url}/v1/chat/completions/render"
    answer = httpx.post(path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["token_ids"]
