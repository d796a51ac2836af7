"""Tiny folders of any image-text model of `transformers`, with random weights.

Each has the default configuration, made small, and the model's own processor. The tables below have
only the sizes that must agree with each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from tests.media.folders import make_tokenizer

_TOKENS = {
    "image_token": "<image>",
    "video_token": "<video>",
    "audio_token": "<audio>",
    "boi_token": "<boi>",
    "eoi_token": "<eoi>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "image_break_token": "[BREAK]",
    "image_end_token": "[END]",
    "fake_image_token": "<fake_token_around_image>",
    "image_boundary_token": "<boundary>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
    "patch_token": "<patch>",
    "tile_token": "<tile>",
    "tile_global_token": "<tile-global>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}
_SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "embed_dim", "out_hidden_size"), 32),
    **dict.fromkeys(("output_hidden_size", "projection_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "depth"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 2048,
}
_VOCABULARY = 360
_ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Changes of a type's small configuration (``config``), and arguments for its processors."""

    config: Callable[[dict[str, Any]], None] = lambda _: None
    image_token: str = "<image>"
    images: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)


def make(folder: Path, model_type: str, kind: Kind) -> None:
    """Write the folder of a model of this type."""
    tokenizer = make_tokenizer(**_TOKENS)
    config_of = CONFIG_MAPPING[model_type]
    config = _small(config_of().to_dict())
    config.pop("model_type")
    _name_tokens(config, tokenizer, kind.image_token)
    kind.config(config)
    torch.manual_seed(0)
    model_of = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type])
    model = model_of(config_of.from_dict(config))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.chat_template = (
        "{% for message in messages %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
        "{% endfor %}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    _save_processors(folder, model_type, kind)


def _save_processors(folder: Path, model_type: str, kind: Kind) -> None:
    classes = dict(IMAGE_PROCESSOR_MAPPING_NAMES).get(model_type, {})
    if "pil" in classes:
        getattr(transformers, classes["pil"])(**kind.images).save_pretrained(folder)
    whole = {"processor_class": dict(PROCESSOR_MAPPING_NAMES)[model_type], **kind.processor}
    (folder / "processor_config.json").write_text(json.dumps(whole))


def _small(config: dict[str, Any]) -> dict[str, Any]:
    return {name: _smaller(name, value) for name, value in config.items()}


def _smaller(name: str, value: Any) -> Any:
    match value:
        case dict() if not name.startswith("rope"):
            return _small(value)
        case list() if name in ("layer_types", "mlp_layer_types"):
            return None
        case int() if name == "vocab_size":
            return _VOCABULARY
        case int() if name in _SMALL:
            return min(value, _SMALL[name])
        case int() if name in _ENDS:
            return _ENDS[name]
        case float() if name == "initializer_range":
            return 0.2  # large, so that changed weights change the output
    return value


def _name_tokens(
    config: dict[str, Any], tokenizer: PreTrainedTokenizerFast, image_token: str
) -> None:
    for name, value in config.items():
        if isinstance(value, int) and name.endswith(("_token_id", "_token_index")):
            said = name.rpartition("_")[0]
            token = image_token if said == "image_token" else _TOKENS.get(said, "<tile>")
            if name not in _ENDS:
                config[name] = tokenizer.convert_tokens_to_ids(token)


def _tower(image_size: int, patch_size: int, **others: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        config["vision_config"].update(image_size=image_size, patch_size=patch_size)
        for part, values in others.items():
            if isinstance(values, dict):
                config[part].update(values)
            else:
                config[part] = values

    return change


_SQUARE = {"size": {"height": 56, "width": 56}}

SERVED = {
    "deepseek_vl": Kind(config=_tower(56, 14), images=_SQUARE, processor={"num_image_tokens": 16}),
    "paddleocr_vl": Kind(
        config=lambda config: config["text_config"]["rope_parameters"].update(
            mrope_section=[2, 1, 1]
        ),
        images={"size": {"shortest_edge": 3136, "longest_edge": 50_176}},
    ),
    "vipllava": Kind(
        config=_tower(56, 14, vision_feature_layers=[-1, -2, -1, -2, -1]),
        images={"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
        processor={
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
}
"""Types without a family, which are served by their own processors."""

TORCHVISION = "torchvision"
REFUSED: dict[str, tuple[Kind, str]] = {
    "aya_vision": (
        Kind(
            config=_tower(56, 14),
            image_token="<patch>",
            images=_SQUARE,
            processor={
                "patch_size": 14,
                "img_size": 56,
                "image_token": "<image>",
                "start_of_img_token": "<img>",
                "end_of_img_token": "</img>",
                "img_patch_token": "<patch>",
                "img_line_break_token": "[BREAK]",
                "tile_token": "<tile>",
                "tile_global_token": "<tile-global>",
            },
        ),
        "aya_vision ",
    ),
    "idefics2": (
        Kind(
            config=_tower(
                56,
                14,
                perceiver_config={
                    "resampler_n_latents": 4,
                    "resampler_depth": 1,
                    "resampler_n_heads": 2,
                    "resampler_head_dim": 8,
                    "num_key_value_heads": 2,
                },
            ),
            images={
                "size": {"shortest_edge": 28, "longest_edge": 56},
                "do_image_splitting": False,
            },
            processor={"image_seq_len": 4},
        ),
        "its processor changes what stands around images, too",
    ),
    "paligemma": (
        Kind(config=_tower(56, 14), images={"image_seq_length": 16, **_SQUARE}),
        "its processor changes what stands around images",
    ),
    "mllama": (
        Kind(config=_tower(224, 14), images={"size": {"height": 224, "width": 224}}),
        "its processor changes what stands around images",
    ),
    "blip": (Kind(), "names a token for images"),
    "git": (Kind(), "names a token for images"),
    "pix2struct": (Kind(), "names a token for images"),
    "udop": (Kind(), "names a token for images"),
    "fuyu": (Kind(), "transformers can't load the model's processor: KeyError"),
    "idefics": (Kind(), "its own processor can't be used: "),
    "instructblip": (Kind(), "names a token for images"),
    "shieldgemma2": (Kind(), "its own processor can't be used: "),
    "t5gemma2": (Kind(), "encoder-decoder models other than of speech"),
    "qwen3_5": (Kind(), TORCHVISION),
    "exaone4_5": (Kind(), TORCHVISION),
    "video_llama_3": (Kind(), TORCHVISION),
    "minicpmv4_6": (Kind(), TORCHVISION),
}
"""Types that are not served, with the error message; `TORCHVISION`: only where it is missing."""
