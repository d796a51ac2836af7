"""vLLM's options behind Afferent: the rows of `docs/vllm-options.md`, and their questions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx2 as httpx
import numpy as np
import torch
from safetensors.torch import save_file

from afferent.conformance.images import draw_image
from tests.images import encoded, in_mode, photo
from tests.server import data_url, image_part
from tests.vllm.asking import ask_all
from tests.vllm.questions import Question, questions

SEED = 5
_RANK = 8
_TIMEOUT_S = 120.0

Way = Literal["features", "bytes"]


@dataclass(frozen=True, slots=True)
class Option:
    """Options of vLLM that are tested together.

    Attributes:
        flags: As the table of the docs names them.
        arguments: Of ``vllm serve``; ``{adapter}`` is the folder of a LoRA adapter.
        ask: Returns the comparable answers of a server, by its URL.
        way: How media reach vLLM.
    """

    flags: str
    arguments: Sequence[str]
    ask: Callable[[str], list[Any]]
    way: Way = "features"


def chats(url: str, *, models: Sequence[str] = ("shapes",)) -> list[Any]:
    """Ask questions of all dialects."""
    asked = [each for each in questions(24, SEED, "shapes") if each.aborts is None]
    all_asked = [
        Question(each.path, {**each.body, "model": model}, each.is_stream)
        for each in asked
        for model in models
    ]
    return [each.said for each in asyncio.run(ask_all(url, all_asked, num_at_once=1))]


def transparent(url: str) -> list[Any]:
    """Ask questions of all dialects, and about pictures with transparent pixels."""
    asked = []
    for number, mode in enumerate(("RGBA", "LA", "P", "RGBA")):
        picture = encoded(in_mode(photo(90 + 20 * number, 120, number), mode), "PNG")
        text = {"type": "text", "text": "What is it?"}
        content = [image_part(data_url(picture, "png")), text]
        body = {
            "model": "shapes",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 24,
            "temperature": 0,
            "logprobs": True,
        }
        asked.append(Question("/v1/chat/completions", body, is_stream=False))
    found = [each.said for each in asyncio.run(ask_all(url, asked, num_at_once=1))]
    assert all(each is not None and each.status == 200 for each in found), found
    return [*found, *chats(url)]


def adapted(url: str) -> list[Any]:
    """Ask each question of the model and of an adapter: they answer differently."""
    found = chats(url, models=("shapes", "adapted"))
    assert found[::2] != found[1::2]
    return found


def pooled(url: str) -> list[Any]:
    """Ask the endpoints of pooling models, with pictures and without."""
    rng = np.random.default_rng(SEED)
    found = []
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
        for _ in range(4):
            picture = {"content": [image_part(data_url(draw_image(rng)))]}
            text = {"type": "text", "text": "What is it?"}
            messages = [{"role": "user", "content": [*picture["content"], text]}]
            for path, body in (
                ("/v1/embeddings", {"messages": messages}),
                ("/v1/embeddings", {"input": "What is it?"}),
                ("/pooling", {"messages": messages}),
                ("/score", {"data_1": picture, "data_2": ["a red circle", "a star"]}),
                ("/score", {"data_1": "a red circle", "data_2": picture}),
                ("/rerank", {"query": "a red circle", "documents": picture}),
            ):
                answer = client.post(path, json={"model": "shapes", **body})
                content = answer.json()
                for changing in ("id", "created"):
                    content.pop(changing, None)
                for result in content.get("results", []):  # behind Afferent: "(media)"
                    del result["document"]["multi_modal"]
                found.append((path, answer.status_code, content))
    return found


def write_adapter(folder: Path) -> Path:
    """Write a LoRA adapter of random weights for the built-in model."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(SEED)
    tensors = {}
    for layer in range(3):
        for name, num_rows in (("q_proj", 128), ("v_proj", 64)):
            at = f"base_model.model.model.language_model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (_RANK, 128)), ("B", (num_rows, _RANK))):
                tensors[f"{at}.lora_{part}.weight"] = 0.1 * torch.randn(shape, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "shapes",
        "r": _RANK,
        "lora_alpha": 2 * _RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


_LORA = ("--enable-lora", "--max-lora-rank", str(_RANK), "--lora-modules", "adapted={adapter}")
OPTIONS = (
    Option("--tensor-parallel-size", ["--tensor-parallel-size", "2"], chats),
    Option("--data-parallel-size", ["--data-parallel-size", "2"], chats),
    Option("--api-server-count", ["--api-server-count", "2"], chats),
    Option("--enable-lora", _LORA, adapted),
    Option("--enable-tower-connector-lora", [*_LORA, "--enable-tower-connector-lora"], adapted),
    Option("--runner", ["--runner", "pooling", "--convert", "embed"], pooled),
    Option("--limit-mm-per-prompt", ["--limit-mm-per-prompt", '{"image": 1}'], chats),
    Option(
        "--media-io-kwargs",
        ["--media-io-kwargs", '{"image": {"rgba_background_color": [0, 0, 0]}}'],
        transparent,
    ),
    Option(
        "--mm-processor-kwargs", ["--mm-processor-kwargs", '{"max_pixels": 12544}'], chats, "bytes"
    ),
    Option("--allowed-media-domains", ["--allowed-media-domains", "example.com"], chats),
)
"""Options with which the answers are those of a stock vLLM."""
