"""Each family answers as a stock vLLM with the same model folder."""

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
from tests.media_files import make_audio, make_video, tone
from tests.server import Server
from tests.vllm.servers import Stock, python

pytestmark = pytest.mark.vllm

_HEAD_DIM = 32  # the smallest that vLLM's kernels for the CPU support


@pytest.fixture(autouse=True)
def _heads(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_size = families.TEXT["num_attention_heads"] * _HEAD_DIM
    monkeypatch.setitem(families.TEXT, "head_dim", _HEAD_DIM)
    monkeypatch.setitem(families.TEXT, "hidden_size", hidden_size)
    monkeypatch.setitem(families.QWEN["qwen2"][2], "hidden_size", hidden_size)
    for generation in ("qwen2_5", "qwen3"):
        monkeypatch.setitem(families.QWEN[generation][2], "out_hidden_size", hidden_size)


def _rename_tower(folder: Path) -> None:
    """Rename the tower's weights to the names before transformers 5, which vLLM knows."""
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
        if "post_" in name:  # else each token would repeat itself in any context
            tensor.fill_(30.0)
    save_file(tensors, path, metadata={"format": "pt"})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["\n" * number for number in range(1, 5)])  # like the tokenizer of Gemma
    tokenizer.save_pretrained(folder)


def _internvl(folder: Path) -> None:
    """Make an InternVL with the files that its whole processor needs."""
    families.make_internvl(folder)
    processor = {"processor_class": "InternVLProcessor", "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    video = {"video_processor_type": "InternVLVideoProcessor", "size": {"height": 28, "width": 28}}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))


def _need(*packages: str) -> None:
    command = [python(), "-c", f"import {', '.join(packages)}"]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip(f"vLLM's environment has not all of {packages}: make setup-vllm")


def _smolvlm(folder: Path) -> None:
    _need("num2words")
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
    """Return questions about images of many sizes, which are shrunk or enlarged.

    Words separate the images, since stock vLLM can't render two adjacent images of Gemma 3.
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
        asked.append(_body(parts))
    return asked


def ask_clips(number: int, seed: int) -> list[dict[str, Any]]:
    """Return questions about clips of several lengths, one longer than the model's limit."""
    rng = np.random.default_rng(seed)
    asked = []
    for index in range(number):
        clips = []
        for _ in range(rng.integers(1, 3)):
            long_s = 31.0 if index == 0 else float(rng.uniform(0.2, 4.0))
            sound = tone(long_s, channels=int(rng.integers(1, 3)), seed=int(rng.integers(99)))
            sound += rng.normal(0, 0.05, sound.shape).astype(np.float32)
            form, subtype = [("WAV", None), ("WAV", "FLOAT"), ("FLAC", None)][index % 3]
            data = base64.b64encode(make_audio(sound, 16_000, form, subtype)).decode()
            clips.append({"data": data, "format": form.lower()})
        parts: list[Any] = [{"type": "input_audio", "input_audio": each} for each in clips]
        asked.append(_body(parts))
    return asked


def _qwen2_audio(folder: Path) -> None:
    _need("soundfile", "av")
    families.make_qwen2_audio(folder)


def ask_videos(number: int, seed: int) -> list[dict[str, Any]]:
    """Return questions about videos of several lengths, rates and sizes, some beside an image."""
    rng = np.random.default_rng(seed)
    asked = []
    for index in range(number):
        video = make_video(
            ("h264", "hevc")[index % 2],
            num_frames=int(rng.integers(4, 90)),
            rate=(30, 25, 12)[index % 3],
            width=2 * int(rng.integers(20, 100)),
            height=2 * int(rng.integers(20, 100)),
        )
        url = "data:video/mp4;base64," + base64.b64encode(video).decode()
        parts: list[Any] = [{"type": "video_url", "video_url": {"url": url}}]
        if index % 3 == 2:
            image = _url(encoded(photo(90, 70, seed=index), "PNG"))
            parts.insert(index % 2, {"type": "image_url", "image_url": {"url": image}})
        asked.append(_body(parts))
    return asked


def _qwen3_vl_video(folder: Path) -> None:
    """Make a Qwen3-VL with a frame size: without one, it depends on the version of vLLM."""
    families.make_qwen_vl(folder, "qwen3")
    own = {"size": {"shortest_edge": 4096, "longest_edge": 200_000}, "patch_size": 16}
    half = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    settings = {"video_processor_type": "Qwen3VLVideoProcessor", **own, **half}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))


FILMS: dict[str, Callable[[Path], None]] = {
    "qwen2_vl_video": lambda folder: families.make_qwen_vl(folder, "qwen2"),
    "qwen2_5_vl_video": lambda folder: families.make_qwen_vl(folder, "qwen2_5"),
    "qwen3_vl_video": _qwen3_vl_video,
}
CLIPS = {"qwen2_audio": _qwen2_audio}


CASES = [
    *((make, ask, {"image"}, '{"image":4,"video":0}') for make in MAKERS.values()),
    *((make, ask_clips, {"audio"}, '{"audio":4}') for make in CLIPS.values()),
    *((make, ask_videos, {"image", "video"}, '{"image":4,"video":2}') for make in FILMS.values()),
]


@pytest.mark.parametrize(("make", "asks", "kinds", "most"), CASES, ids=[*MAKERS, *CLIPS, *FILMS])
def test_as_stock_answers(
    make: Callable[[Path], None],
    asks: Callable[[int, int], list[dict[str, Any]]],
    kinds: set[str],
    most: str,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    make(folder)
    asked = asks(8, 3)
    common = ("--served-model-name", "tiny", "--limit-mm-per-prompt", most)
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
    way = 'afferent_upstream_items_total{{modality="{}",way="features"}}'
    assert {name for name, number in ways.items() if number} == {way.format(kind) for kind in kinds}
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
    first = [each.logprobs[0] for each in expected]
    assert np.std(first) > 1e-3, "whatever the image is, the answer is the same"


def _body(parts: list[Any]) -> dict[str, Any]:
    shown = [each for part in parts for each in (part, {"type": "text", "text": "this"})]
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": shown}],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
    }


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
    """Return the tokens of the prompt."""
    path = f"{url}/v1/chat/completions/render"
    answer = httpx.post(path, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["token_ids"]
