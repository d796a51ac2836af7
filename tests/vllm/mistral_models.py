"""Tiny models in Mistral's own format. Their tokens are 32 special ones, and bytes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.engine import families

_ADAPTER, _WHISPER = "vision_language_adapter", "mm_whisper_embeddings"
_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[TOOL_CONTENT]", "[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]"),
)
_WIDTH, _INNER, _NUM_LAYERS, _NUM_MELS, _DOWN = 32, 64, 2, 16, 4
_CHUNK_S = 2


def make_pixtral(folder: Path) -> None:
    """Make a Pixtral, beside the settings of a Mistral 3."""
    families.make_mistral3(folder)
    (folder / "model.safetensors").unlink()
    _make_images(folder, merge=1)


def make_mistral3(folder: Path) -> None:
    """Make a Mistral 3, which merges four patches, without files of `transformers`."""
    _make_images(folder, merge=2)


def _make_images(folder: Path, *, merge: int) -> None:
    image: dict[str, Any] = {"image_patch_size": 14, "max_image_size": 112}
    vision: dict[str, Any] = {
        "hidden_size": _WIDTH,
        "num_channels": 3,
        "image_size": 112,
        "patch_size": 14,
        "intermediate_size": _INNER,
        "num_hidden_layers": _NUM_LAYERS,
        "num_attention_heads": 2,
        "rope_theta": 10_000.0,
        "image_token_id": 10,
    }
    if merge > 1:
        image["spatial_merge_size"] = vision["spatial_merge_size"] = merge
        vision |= {"mm_projector_id": "patch_merge", "add_pre_mm_projector_layer_norm": True}
    _write(folder, {"version": "v3"}, {"image": image}, {"vision_encoder": vision})
    torch.manual_seed(0)
    hidden_size = families.TEXT["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "vision_encoder.patch_conv.weight": (_WIDTH, 3, 14, 14),
        "vision_encoder.ln_pre.weight": (_WIDTH,),
        f"{_ADAPTER}.w_in.weight": (hidden_size, _WIDTH),
        f"{_ADAPTER}.w_in.bias": (hidden_size,),
        f"{_ADAPTER}.w_out.weight": (hidden_size, hidden_size),
        f"{_ADAPTER}.w_out.bias": (hidden_size,),
        **_layers("vision_encoder.transformer.layers", _WIDTH, _WIDTH, _WIDTH),
    }
    if merge > 1:
        shapes |= {
            "patch_merger.merging_layer.weight": (_WIDTH, _WIDTH * merge**2),
            "pre_mm_projector_norm.weight": (_WIDTH,),
        }
    _save(folder, shapes)


def make_voxtral(folder: Path) -> None:
    """Make a Voxtral, with chunks of 2 s."""
    spectra = {"num_mel_bins": _NUM_MELS, "hop_length": 160, "window_size": 400}
    positions = _CHUNK_S * 50
    audio = {
        "sampling_rate": 16_000,
        "frame_rate": 12.5,
        "audio_encoding_config": spectra,
        "chunk_length_s": float(_CHUNK_S),
    }
    encoder = {
        "audio_encoding_args": {**spectra, "sampling_rate": 16_000},
        "dim": _WIDTH,
        "n_layers": _NUM_LAYERS,
        "head_dim": _WIDTH // 2,
        "hidden_dim": _INNER,
        "n_heads": 2,
        "vocab_size": 288,
        "max_source_positions": positions,
    }
    down = {"downsample_factor": _DOWN}
    whisper = {"whisper_model_args": {"encoder_args": encoder, "downsample_args": down}}
    special = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(_SPECIAL)
    ]
    _write(
        folder,
        {"version": "v7"},
        {"audio": audio, "special_tokens": special},
        {"multimodal": whisper},
    )
    torch.manual_seed(0)
    hidden_size, tower = families.TEXT["hidden_size"], f"{_WHISPER}.whisper_encoder"
    shapes: dict[str, tuple[int, ...]] = {
        f"{_WHISPER}.audio_language_projection.0.weight": (hidden_size, _DOWN * _WIDTH),
        f"{_WHISPER}.audio_language_projection.2.weight": (hidden_size, hidden_size),
        f"{tower}.conv_layers.0.weight": (_WIDTH, _NUM_MELS, 3),
        f"{tower}.conv_layers.0.bias": (_WIDTH,),
        f"{tower}.conv_layers.1.weight": (_WIDTH, _WIDTH, 3),
        f"{tower}.conv_layers.1.bias": (_WIDTH,),
        f"{tower}.transformer.norm.weight": (_WIDTH,),
        f"{tower}.transformer.norm.bias": (_WIDTH,),
    }
    for index in range(_NUM_LAYERS):
        layer = f"{tower}.transformer.layers.{index}."
        for name in ("attention.wq", "attention.wv", "attention.wo", "attention.wk"):
            shapes[f"{layer}{name}.weight"] = (_WIDTH, _WIDTH)
            if name != "attention.wk":
                shapes[f"{layer}{name}.bias"] = (_WIDTH,)
        for name, rows, columns in (("w1", _INNER, _WIDTH), ("w2", _WIDTH, _INNER)):
            shapes[f"{layer}feed_forward.{name}.weight"] = (rows, columns)
            shapes[f"{layer}feed_forward.{name}.bias"] = (rows,)
        for name in ("attention_norm", "ffn_norm"):
            shapes |= {f"{layer}{name}.weight": (_WIDTH,), f"{layer}{name}.bias": (_WIDTH,)}
    _save(folder, shapes, embedded=f"{_WHISPER}.tok_embeddings.weight")


def _write(
    folder: Path, version: dict[str, str], tekken: dict[str, Any], params: dict[str, Any]
) -> None:
    vocab = [
        {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": None}
        for byte in range(256)
    ]
    config = {
        "pattern": ".",
        "num_vocab_tokens": 256,
        "default_vocab_size": 288,
        "default_num_special_tokens": 32,
        **version,
    }
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab, **tekken}))
    text = {
        "dim": families.TEXT["hidden_size"],
        "n_layers": _NUM_LAYERS,
        "head_dim": families.TEXT["head_dim"],
        "hidden_dim": _INNER,
        "n_heads": 4,
        "n_kv_heads": 2,
        "rope_theta": 10_000.0,
        "norm_eps": 1e-5,
        "vocab_size": 288,
        "max_position_embeddings": 2048,
    }
    (folder / "params.json").write_text(json.dumps({**text, **params}))


def _layers(prefix: str, width: int, queries: int, keys: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for name in (f"{prefix}.{index}." for index in range(_NUM_LAYERS)):
        for matrix, rows in (("wq", queries), ("wk", keys), ("wv", keys)):
            shapes[f"{name}attention.{matrix}.weight"] = (rows, width)
        shapes[f"{name}attention.wo.weight"] = (width, queries)
        for matrix in ("w1", "w3"):
            shapes[f"{name}feed_forward.{matrix}.weight"] = (_INNER, width)
        shapes[f"{name}feed_forward.w2.weight"] = (width, _INNER)
        for norm in ("attention_norm", "ffn_norm"):
            shapes[f"{name}{norm}.weight"] = (width,)
    return shapes


def _save(
    folder: Path,
    shapes: dict[str, tuple[int, ...]],
    *,
    embedded: str = "tok_embeddings.weight",
) -> None:
    hidden_size, head_dim = families.TEXT["hidden_size"], families.TEXT["head_dim"]
    whole = {
        embedded: (288, hidden_size),
        "output.weight": (288, hidden_size),
        "norm.weight": (hidden_size,),
        **_layers("layers", hidden_size, 4 * head_dim, 2 * head_dim),
        **shapes,
    }
    weights = {
        name: torch.ones(shape)
        if len(shape) == 1 and name.endswith("weight")
        else 0.3 * torch.randn(shape)
        for name, shape in whole.items()
    }
    save_file(weights, folder / "consolidated.safetensors", metadata={"format": "pt"})
