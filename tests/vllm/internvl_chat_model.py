"""Tiny InternVL in its own format: its configuration is code in the folder, its template is plain
text, and vLLM has the only implementation of its encoder here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.engine import families
from tests.media.folders import make_tokenizer

_CODE: Final = """
from transformers import PretrainedConfig, Qwen2Config


class InternVLChatConfig(PretrainedConfig):
    model_type = "internvl_chat"

    def __init__(self, vision_config=None, llm_config=None, **settings):
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        self.llm_config = Qwen2Config(**(llm_config or {}))
        super().__init__(**settings)
"""
_TEMPLATE: Final = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
<|im_start|>assistant
"""
_WIDTH, _INNER, _SIDE, _PATCH, _NUM_LAYERS = 32, 64, 28, 7, 2


def make(folder: Path) -> None:
    """Make the model, with tiles of 28 pixels and 4 tokens each."""
    tokenizer = make_tokenizer(
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        begin_token="<|im_start|>",
        end_token="<|im_end|>",
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    text = Qwen2Config(**families.TEXT)
    language_model = Qwen2ForCausalLM(text)
    config = {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoConfig": "configuration_internvl_chat.InternVLChatConfig"},
        "model_type": "internvl_chat",
        "llm_config": text.to_dict() | {"architectures": ["Qwen2ForCausalLM"]},
        "vision_config": {
            "model_type": "intern_vit_6b",
            "hidden_size": _WIDTH,
            "intermediate_size": _INNER,
            "num_hidden_layers": _NUM_LAYERS,
            "num_attention_heads": 2,
            "image_size": _SIDE,
            "patch_size": _PATCH,
            "hidden_act": "gelu",
            "norm_type": "layer_norm",
            "layer_norm_eps": 1e-6,
            "qkv_bias": True,
            "qk_normalization": False,
            "initializer_factor": 1.0,
        },
        "select_layer": -1,
        "ps_version": "v2",
        "downsample_ratio": 0.5,
        "force_image_size": _SIDE,
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 6,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_internvl_chat.py").write_text(_CODE)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": tokenizer.eos_token_id})
    )
    tensors = {
        f"language_model.{name}": tensor for name, tensor in language_model.state_dict().items()
    }
    save_file(tensors | _encoder(text.hidden_size), folder / "model.safetensors")


def _encoder(hidden_size: int) -> dict[str, torch.Tensor]:
    embeddings, joined = "vision_model.embeddings", 4 * _WIDTH
    shapes: dict[str, tuple[int, ...]] = {
        f"{embeddings}.class_embedding": (1, 1, _WIDTH),
        f"{embeddings}.position_embedding": (1, (_SIDE // _PATCH) ** 2 + 1, _WIDTH),
        f"{embeddings}.patch_embedding.weight": (_WIDTH, 3, _PATCH, _PATCH),
        f"{embeddings}.patch_embedding.bias": (_WIDTH,),
        "mlp1.0.weight": (joined,),
        "mlp1.0.bias": (joined,),
        "mlp1.1.weight": (hidden_size, joined),
        "mlp1.1.bias": (hidden_size,),
        "mlp1.3.weight": (hidden_size, hidden_size),
        "mlp1.3.bias": (hidden_size,),
    }
    for layer in (f"vision_model.encoder.layers.{index}." for index in range(_NUM_LAYERS)):
        for name, rows, columns in (
            ("attn.qkv", 3 * _WIDTH, _WIDTH),
            ("attn.proj", _WIDTH, _WIDTH),
            ("mlp.fc1", _INNER, _WIDTH),
            ("mlp.fc2", _WIDTH, _INNER),
        ):
            shapes |= {f"{layer}{name}.weight": (rows, columns), f"{layer}{name}.bias": (rows,)}
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "ls1", "ls2"):
            shapes[layer + name] = (_WIDTH,)
    return {
        name: torch.ones(shape) if name.endswith(_ONES) else 0.3 * torch.randn(shape)
        for name, shape in shapes.items()
    }


_ONES: Final = ("norm1.weight", "norm2.weight", "ls1", "ls2", "mlp1.0.weight")
