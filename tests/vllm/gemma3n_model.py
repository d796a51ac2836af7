"""Make a tiny Gemma 3n, with the libraries of vLLM's environment: its encoder is one of timm.

python -m tests.vllm.gemma3n_model FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import (
    Gemma3nAudioFeatureExtractor,
    Gemma3nConfig,
    Gemma3nForConditionalGeneration,
    Gemma3nProcessor,
    SiglipImageProcessor,
)

from tests.engine import families

_SIDE = 512
_NUM_EMBEDS = (_SIDE // 32) ** 2
_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
    "boa_token": "<start_of_audio>",
    "eoa_token": "<end_of_audio>",
    "audio_token": "<audio_soft_token>",
}


def make(folder: Path) -> None:
    """Make the model, with images of 256 tokens."""
    tokenizer = families.make_tokenizer(**_TOKENS)
    tokenizer.add_tokens(["\n" * number for number in range(1, 5)])  # like the tokenizer of Gemma
    ids = {
        name.replace("_token", "_token_id"): tokenizer.convert_tokens_to_ids(token)
        for name, token in _TOKENS.items()
    }
    torch.manual_seed(0)
    config = Gemma3nConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "vocab_size_per_layer_input": len(tokenizer),
            "hidden_size": 64,
            "hidden_size_per_layer_input": 16,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 64,
            "num_kv_shared_layers": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "architecture": "test_convnext",
            "hidden_size": 64,
            "model_args": None,
            "vocab_size": 8,
            "vocab_offset": len(tokenizer),
        },
        audio_config={
            "hidden_size": 32,
            "conf_num_hidden_layers": 1,
            "conf_num_attention_heads": 2,
            "vocab_size": 8,
            "vocab_offset": len(tokenizer) + 8,
        },
        vision_soft_tokens_per_image=_NUM_EMBEDS,
        **ids,
    )
    model = Gemma3nForConditionalGeneration(config)
    for name, each in model.named_parameters():
        if each.ndim > 1 and "vision_tower" not in name:
            torch.nn.init.normal_(each, std=0.3)
    Gemma3nProcessor(
        feature_extractor=Gemma3nAudioFeatureExtractor(),
        image_processor=SiglipImageProcessor(
            size={"height": _SIDE, "width": _SIDE}, do_normalize=False, resample=2
        ),
        tokenizer=tokenizer,
        image_seq_length=_NUM_EMBEDS,
    ).save_pretrained(folder)
    families.save(folder, model, tokenizer, _TOKENS["image_token"])


if __name__ == "__main__":
    make(Path(sys.argv[1]))
