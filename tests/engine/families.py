"""Tiny models of many families, with random weights, as `transformers` saves them.

The weights are large, so that media change the tokens; windows and tiles are small, so that they
matter in short prompts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vImageProcessorPil,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm46VImageProcessorPil,
    GlmOcrConfig,
    GlmOcrForConditionalGeneration,
    GotOcr2ImageProcessorPil,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LightOnOcrConfig,
    LightOnOcrForConditionalGeneration,
    Llama4Config,
    Llama4ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessorPil,
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_6ImageProcessorPil,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5OmniConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessorPil,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

from tests.media.folders import make_tokenizer

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
AUDIO: dict[str, Any] = {
    "num_mel_bins": 16,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "initializer_range": 0.3,
}
"""Settings of the audio tower of Qwen's models, without the size of its output."""
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "norm_topk_prob": True,
}
"""Settings of a language model with experts, in addition to `TEXT`."""

QWEN: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2": (
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2, "patch_size": 14},
    ),
    "qwen2_5": (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        {
            "hidden_size": 32,
            "out_hidden_size": 32,
            "intermediate_size": 64,
            "fullatt_block_indexes": [1],
            "window_size": 56,
            "patch_size": 14,
        },
    ),
    "qwen3": (
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        {
            "hidden_size": 32,
            "out_hidden_size": 32,
            "intermediate_size": 64,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 64,
            "patch_size": 16,
        },
    ),
}
QWEN["qwen3_moe"] = (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration, QWEN["qwen3"][2])
"""Configuration, model, and the settings of the encoder."""

SUPPRESSED = list(range(3, 160))


def template(marker: str) -> str:
    """Return a chat template that writes an item as ``marker``."""
    return f"""\
{{%- for message in messages -%}}
{{%- for part in message['content'] -%}}
{{%- if part['type'] != 'text' %}}{marker}
{{%- else %}}{{{{ part['text'] }}}}
{{%- endif -%}}
{{%- endfor %}}
{{% endfor -%}}
"""


def save(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast, marker: str) -> None:
    """Save the weights, the tokenizer and the chat template."""
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.chat_template = template(marker)
    tokenizer.save_pretrained(folder)


def make_qwen_vl(folder: Path, generation: str, **text: int) -> None:
    """Make a ``qwen2``, a ``qwen2_5`` (windows in its encoder), a ``qwen3`` (deepstack), or a
    ``qwen3_moe`` (experts).
    """
    tokenizer = make_tokenizer(
        image="<|image_pad|>",
        video="<|video_pad|>",
        start="<|vision_start|>",
        end="<|vision_end|>",
    )
    config_of, model_of, vision = QWEN[generation]
    ids = tokenizer.convert_tokens_to_ids
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [TEXT["head_dim"] // part for part in (4, 8, 8)],
    }
    experts = EXPERTS if generation == "qwen3_moe" else {}
    if generation.startswith("qwen3"):
        rope["mrope_interleaved"] = True
    torch.manual_seed(0)
    model = model_of(
        config_of(
            text_config={**TEXT, **experts, **text, "rope_parameters": rope},
            vision_config={"depth": 3, "num_heads": 2, "initializer_range": 0.3, **vision},
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
            vision_start_token_id=ids("<|vision_start|>"),
            vision_end_token_id=ids("<|vision_end|>"),
        )
    )
    kind = "{{ '<|video_pad|>' if part['type'] == 'video' else '<|image_pad|>' }}"
    save(folder, model, tokenizer, f"<|vision_start|>{kind}<|vision_end|>")
    Qwen2VLImageProcessorPil(
        patch_size=vision["patch_size"], size={"shortest_edge": 1024, "longest_edge": 96 * 96}
    ).save_pretrained(folder)


def make_gemma3(folder: Path) -> None:
    """Make a Gemma 3: one layer with a window of 16, one without; images of 16 tokens.

    The tokens of an image attend to each other.
    """
    tokenizer = make_tokenizer(
        boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
    )
    ids = tokenizer.convert_tokens_to_ids
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(
            text_config={
                **TEXT,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"],
                "query_pre_attn_scalar": 8,
            },
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 56,
                "patch_size": 7,
            },
            mm_tokens_per_image=16,
            boi_token_index=ids("<start_of_image>"),
            eoi_token_index=ids("<end_of_image>"),
            image_token_index=ids("<image_soft_token>"),
        )
    )
    # Its initial value is zero, with which all images would be the same.
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.3)
    Gemma3Processor(
        image_processor=Gemma3ImageProcessorPil(size={"height": 56, "width": 56}),
        tokenizer=tokenizer,
        image_seq_length=16,
    ).save_pretrained(folder)
    save(folder, model, tokenizer, "<start_of_image>")


def make_internvl(folder: Path) -> None:
    """Make an InternVL with tiles of 28 pixels, 4 tokens each."""
    tokenizer = make_tokenizer(
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    torch.manual_seed(0)
    model = InternVLForConditionalGeneration(
        InternVLConfig(
            text_config={"model_type": "qwen2", **TEXT},
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": [28, 28],
                "patch_size": [7, 7],
                "initializer_range": 0.3,
            },
            image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
            image_seq_length=4,
        )
    )
    save(folder, model, tokenizer, "<IMG_CONTEXT>\n")
    GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, max_patches=4).save_pretrained(
        folder
    )
    write(folder, processor_class="InternVLProcessor", image_seq_length=4)


def make_idefics3(folder: Path) -> None:
    """Make an Idefics3: it cuts images into pieces of 4 tokens, with text between them."""
    _make_idefics3(folder, Idefics3Config, Idefics3ForConditionalGeneration)
    Idefics3ImageProcessorPil(**_PIECES).save_pretrained(folder)
    write(folder, processor_class="Idefics3Processor", image_seq_len=4)


def make_smolvlm(folder: Path) -> None:
    """Make a SmolVLM, which is an Idefics3 with other names."""
    _make_idefics3(folder, SmolVLMConfig, SmolVLMForConditionalGeneration)
    SmolVLMImageProcessorPil(**_PIECES).save_pretrained(folder)
    write(folder, processor_class="SmolVLMProcessor", image_seq_len=4)


_PIECES: dict[str, Any] = {
    "size": {"longest_edge": 112},
    "max_image_size": {"longest_edge": 56},
}


def _make_idefics3(folder: Path, config_of: Any, model_of: Any) -> None:
    tokenizer = make_tokenizer(
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
    )
    torch.manual_seed(0)
    model = model_of(
        config_of(
            text_config={"model_type": "llama", **TEXT, "pad_token_id": 2},
            vision_config=_tower(56, 14),
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            scale_factor=2,
        )
    )
    save(folder, model, tokenizer, "<image>")


def make_llava_next(folder: Path) -> None:
    """Make a LLaVA-NeXT: tiles of 56 pixels, 16 tokens each, and the whole image."""
    _make_any_resolution(
        folder,
        LlavaNextConfig,
        LlavaNextForConditionalGeneration,
        vision_config={**_tower(56, 14), "model_type": "clip_vision_model", "projection_dim": 32},
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    LlavaNextImageProcessorPil(
        size={"shortest_edge": 56},
        crop_size={"height": 56, "width": 56},
        image_grid_pinpoints=PINPOINTS,
    ).save_pretrained(folder)
    write(
        folder,
        processor_class="LlavaNextProcessor",
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def make_llava_onevision(folder: Path) -> None:
    """Make a LLaVA-OneVision: a LLaVA-NeXT that uses fewer tokens for more than 9 tiles."""
    _make_any_resolution(
        folder,
        LlavaOnevisionConfig,
        LlavaOnevisionForConditionalGeneration,
        vision_config={**_tower(56, 14), "model_type": "siglip_vision_model"},
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    LlavaOnevisionImageProcessorPil(
        size={"height": 56, "width": 56}, image_grid_pinpoints=PINPOINTS
    ).save_pretrained(folder)
    write(
        folder,
        processor_class="LlavaOnevisionProcessor",
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )


PINPOINTS = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168], [224, 224]]


def _make_any_resolution(folder: Path, config_of: Any, model_of: Any, **config: Any) -> None:
    tokenizer = make_tokenizer(image_token="<image>", video_token="<video>")
    ids = tokenizer.convert_tokens_to_ids
    torch.manual_seed(0)
    if config_of is LlavaOnevisionConfig:
        config["video_token_id"] = ids("<video>")
    model = model_of(
        config_of(
            text_config={"model_type": "qwen2", **TEXT},
            image_token_id=ids("<image>"),
            image_grid_pinpoints=PINPOINTS,
            **config,
        )
    )
    save(folder, model, tokenizer, "<image>")


def make_pixtral(folder: Path) -> None:
    """Make a Pixtral, which is a LLaVA with patches of 14 pixels."""
    _make_pixtral(folder, LlavaConfig, LlavaForConditionalGeneration, merge=1)


def make_mistral3(folder: Path) -> None:
    """Make a Mistral 3, which is a Pixtral with one token for four patches."""
    _make_pixtral(
        folder, Mistral3Config, Mistral3ForConditionalGeneration, merge=2, spatial_merge_size=2
    )


def _make_pixtral(folder: Path, config_of: Any, model_of: Any, *, merge: int, **own: Any) -> None:
    tokenizer = make_tokenizer(
        image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]"
    )
    tower = {**_tower(112, 14), "model_type": "pixtral", "head_dim": 16}
    torch.manual_seed(0)
    model = model_of(
        config_of(
            text_config={"model_type": "mistral", **TEXT, "sliding_window": None},
            vision_config={**tower, "hidden_act": "silu"},
            image_token_id=tokenizer.convert_tokens_to_ids("[IMG]"),
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            **own,
        )
    )
    save(folder, model, tokenizer, "[IMG]")
    PixtralImageProcessorPil(
        size={"longest_edge": 112}, patch_size={"height": 14, "width": 14}
    ).save_pretrained(folder)
    write(folder, processor_class="PixtralProcessor", patch_size=14, spatial_merge_size=merge)


def make_lighton_ocr(folder: Path) -> None:
    """Make a LightOnOCR, which is a Mistral 3 without tokens at the ends of rows."""
    _make_pixtral(
        folder, LightOnOcrConfig, LightOnOcrForConditionalGeneration, merge=2, spatial_merge_size=2
    )
    write(folder, processor_class="LightOnOcrProcessor", patch_size=14, spatial_merge_size=2)


def make_glm4v(folder: Path) -> None:
    """Make a GLM-4V with patches of 14 pixels, four for each token."""
    _make_glm(folder, Glm4vConfig, Glm4vForConditionalGeneration)
    Glm4vImageProcessorPil(**_GLM_SIZE).save_pretrained(folder)
    write(folder, processor_class="Glm4vProcessor")


def make_glm4v_moe(folder: Path) -> None:
    """Make a GLM-4.5V: a GLM-4V with experts, and without rotation of half of each head."""
    experts = {**EXPERTS, "n_routed_experts": 4, "use_qk_norm": False, "partial_rotary_factor": 0.5}
    _make_glm(folder, Glm4vMoeConfig, Glm4vMoeForConditionalGeneration, **experts)
    Glm4vImageProcessorPil(**_GLM_SIZE).save_pretrained(folder)
    write(folder, processor_class="Glm4vProcessor")


def make_glm_ocr(folder: Path) -> None:
    """Make a GLM-OCR, which is a GLM-4V for pages."""
    _make_glm(folder, GlmOcrConfig, GlmOcrForConditionalGeneration)
    Glm46VImageProcessorPil(**_GLM_SIZE).save_pretrained(folder)
    write(folder, processor_class="Glm46VProcessor")


_GLM_SIZE: dict[str, Any] = {"size": {"shortest_edge": 4096, "longest_edge": 2 * 96 * 96}}


def _make_glm(folder: Path, config_of: Any, model_of: Any, **text: Any) -> None:
    tokenizer = make_tokenizer(
        image_token="<|image|>",
        video_token="<|video|>",
        begin_image="<|begin_of_image|>",
        end_image="<|end_of_image|>",
        begin_video="<|begin_of_video|>",
        end_video="<|end_of_video|>",
    )
    ids = tokenizer.convert_tokens_to_ids
    rotated = int(TEXT["head_dim"] * text.get("partial_rotary_factor", 1))
    eighth = rotated // 8
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [rotated // 2 - 2 * eighth, eighth, eighth],
        "partial_rotary_factor": rotated / TEXT["head_dim"],
    }
    torch.manual_seed(0)
    model = model_of(
        config_of(
            text_config={**TEXT, "pad_token_id": 2, **text, "rope_parameters": rope},
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "num_heads": 2,
                "intermediate_size": 64,
                "out_hidden_size": TEXT["hidden_size"],
                "image_size": 56,
                "initializer_range": 0.3,
            },
            image_token_id=ids("<|image|>"),
            video_token_id=ids("<|video|>"),
            image_start_token_id=ids("<|begin_of_image|>"),
            image_end_token_id=ids("<|end_of_image|>"),
            video_start_token_id=ids("<|begin_of_video|>"),
            video_end_token_id=ids("<|end_of_video|>"),
        )
    )
    save(folder, model, tokenizer, "<|begin_of_image|><|image|><|end_of_image|>")


def make_llama4(folder: Path) -> None:
    """Make a Llama 4 with tiles of 28 pixels, 4 tokens each; its processor needs torchvision."""
    tokenizer = make_tokenizer(
        image_token="<|image|>",
        patch_token="<|patch|>",
        start="<|image_start|>",
        end="<|image_end|>",
        between="<|tile_x_separator|>",
        row_end="<|tile_y_separator|>",
    )
    ids = tokenizer.convert_tokens_to_ids
    torch.manual_seed(0)
    model = Llama4ForConditionalGeneration(
        Llama4Config(
            text_config={
                **TEXT,
                "intermediate_size_mlp": 64,
                "num_local_experts": 4,
                "interleave_moe_layer_step": 2,
                "pad_token_id": 2,
            },
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 7,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
                "vision_output_dim": 32,
                "initializer_range": 0.3,
            },
            boi_token_index=ids("<|image_start|>"),
            eoi_token_index=ids("<|image_end|>"),
            image_token_index=ids("<|patch|>"),
        )
    )
    save(folder, model, tokenizer, "<|image|>")
    images = {"image_processor_type": "Llama4ImageProcessorFast", "max_patches": 6}
    size = {"size": {"height": 28, "width": 28}}
    (folder / "preprocessor_config.json").write_text(json.dumps({**images, **size}))
    write(folder, processor_class="Llama4Processor", patch_size=7)


def make_minicpm(folder: Path) -> None:
    """Make a MiniCPM-V 4.6 with slices of about 56 pixels, and 4 tokens of 28 pixels each."""
    tokenizer = make_tokenizer(
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        image_start_token="<image>",
        image_end_token="</image>",
        slice_start_token="<slice>",
        slice_end_token="</slice>",
        image_id_start_token="<image_id>",
        image_id_end_token="</image_id>",
    )
    ids = tokenizer.convert_tokens_to_ids
    torch.manual_seed(0)
    # Heads of 128 are the smallest of linear attention that vLLM's kernels for the CPU support.
    linear = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    model = MiniCPMV4_6ForConditionalGeneration(
        MiniCPMV4_6Config(
            text_config={
                "model_type": "qwen3_5_text",
                **TEXT,
                **linear,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 2,
            },
            vision_config=_tower(56, 7),
            insert_layer_id=0,
            image_size=56,
            image_token_id=ids("<|image_pad|>"),
            video_token_id=ids("<|video_pad|>"),
        )
    )
    save(folder, model, tokenizer, "<|image_pad|>")
    sizes = {"patch_size": 7, "scale_resolution": 56}
    MiniCPMV4_6ImageProcessorPil(**sizes, max_slice_nums=6).save_pretrained(folder)
    video = {"video_processor_type": "MiniCPMV4_6VideoProcessor", **sizes}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video))
    write(folder, processor_class="MiniCPMV4_6Processor")


def _tower(image_size: int, patch_size: int) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": image_size,
        "patch_size": patch_size,
        "initializer_range": 0.3,
    }


def write(folder: Path, **processor: Any) -> None:
    """Write the settings of the whole processor, which needs torchvision to save itself."""
    (folder / "processor_config.json").write_text(json.dumps(processor))


def make_qwen2_audio(folder: Path) -> None:
    """Make a Qwen2-Audio for clips of up to 30 s."""
    tokenizer = make_tokenizer(
        audio_token="<|AUDIO|>", audio_bos_token="<|audio_bos|>", audio_eos_token="<|audio_eos|>"
    )
    torch.manual_seed(0)
    model = Qwen2AudioForConditionalGeneration(
        Qwen2AudioConfig(
            text_config={"model_type": "qwen2", **TEXT},
            audio_config={
                "num_mel_bins": 16,
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "init_std": 0.3,
                "initializer_range": 0.3,
            },
            audio_token_index=tokenizer.convert_tokens_to_ids("<|AUDIO|>"),
        )
    )
    save(folder, model, tokenizer, "<|audio_bos|><|AUDIO|><|audio_eos|>")
    WhisperFeatureExtractor(feature_size=16).save_pretrained(folder)
    write(folder, processor_class="Qwen2AudioProcessor")


def make_qwen2_5_omni(folder: Path) -> None:
    """Make the thinker of a Qwen2.5-Omni, for clips of up to 4 s."""
    thinker = {
        "vision_config": {**QWEN["qwen2_5"][2], "depth": 3, "num_heads": 2},
        "audio_config": {"n_window": 10, "max_source_positions": 20},
        "seconds_per_chunk": 2,
    }
    _make_omni(folder, Qwen2_5OmniConfig, Qwen2_5OmniThinkerForConditionalGeneration, thinker)


def make_qwen3_omni(folder: Path) -> None:
    """Make the thinker of a Qwen3-Omni, which has experts."""
    thinker = {
        "vision_config": {**QWEN["qwen3"][2], "depth": 3, "num_heads": 2, "image_size": 128}
        | {"apply_vit_abs_pos_embed": True},  # vLLM reads it from every folder
        "audio_config": {"downsample_hidden_size": 16, "n_window_infer": 200},
    }
    _make_omni(
        folder,
        Qwen3OmniMoeConfig,
        Qwen3OmniMoeThinkerForConditionalGeneration,
        thinker,
        **EXPERTS,
        num_experts=4,
        tie_word_embeddings=False,
    )


def _make_omni(
    folder: Path, config_of: Any, model_of: Any, thinker: dict[str, Any], **text: Any
) -> None:
    tokenizer = make_tokenizer(
        image_token="<|IMAGE|>",
        video_token="<|VIDEO|>",
        audio_token="<|AUDIO|>",
        vision_bos_token="<|vision_bos|>",
        vision_eos_token="<|vision_eos|>",
        audio_bos_token="<|audio_bos|>",
        audio_eos_token="<|audio_eos|>",
    )
    ids = tokenizer.convert_tokens_to_ids
    is_third = config_of is Qwen3OmniMoeConfig
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [TEXT["head_dim"] // part for part in (4, 8, 8)],
    }
    if is_third:
        rope["mrope_interleaved"] = True
    audio = {**AUDIO, "output_dim": TEXT["hidden_size"]}
    suffix = "id" if is_third else "index"
    whole = config_of(
        thinker_config={
            **thinker,
            "text_config": {**TEXT, **text, "rope_parameters": rope},
            "vision_config": {**thinker["vision_config"], "initializer_range": 0.3},
            "audio_config": {**audio, **thinker["audio_config"]},
            f"image_token_{suffix}": ids("<|IMAGE|>"),
            f"video_token_{suffix}": ids("<|VIDEO|>"),
            f"audio_token_{suffix}": ids("<|AUDIO|>"),
            "audio_start_token_id": ids("<|audio_bos|>"),
            "audio_end_token_id": ids("<|audio_eos|>"),
            "vision_start_token_id": ids("<|vision_bos|>"),
            "vision_end_token_id": ids("<|vision_eos|>"),
            "initializer_range": 0.3,
        },
        enable_audio_output=False,
    )
    torch.manual_seed(0)
    model = model_of(whole.thinker_config)
    kind = "{{ '<|AUDIO|>' if 'audio' in part['type'] else '<|IMAGE|>' }}"
    save(folder, model, tokenizer, f"<|vision_bos|>{kind}<|vision_eos|>")
    path = folder / "model.safetensors"
    weights = {f"thinker.{name}": tensor for name, tensor in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    whole.architectures = [model_of.__name__.replace("Thinker", "")]
    whole.save_pretrained(folder)
    size = {"size": {"shortest_edge": 1024, "longest_edge": 96 * 96}}
    images = Qwen2VLImageProcessorPil(patch_size=thinker["vision_config"]["patch_size"], **size)
    audio_settings = WhisperFeatureExtractor(feature_size=16, chunk_length=4).to_dict()
    settings = {**audio_settings, **images.to_dict()}
    settings["image_processor_type"] = "Qwen2VLImageProcessor"
    settings["feature_extractor_type"] = "WhisperFeatureExtractor"
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    name = "Qwen3OmniMoeProcessor" if is_third else "Qwen2_5OmniProcessor"
    write(folder, processor_class=name)


def make_whisper(
    folder: Path, tokenizer: PreTrainedTokenizerFast | None = None, **config: Any
) -> None:
    """Make a Whisper with an encoder of 2 s, and with tokens that are suppressed.

    Args:
        tokenizer: Its tokenizer; by default, a small one.
        config: Other values of its configuration.
    """
    tokenizer = tokenizer or make_tokenizer()
    torch.manual_seed(0)
    usual = {
        "vocab_size": 320,
        "num_mel_bins": 16,
        "d_model": 32,
        "encoder_layers": 3,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_source_positions": 100,
        "max_target_positions": 256,
        "init_std": 0.3,
        "decoder_start_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    model = WhisperForConditionalGeneration(WhisperConfig(**{**usual, **config}))
    model.generation_config.suppress_tokens = config.get("suppress_tokens", SUPPRESSED)
    save(folder, model, tokenizer, "")
    WhisperFeatureExtractor(feature_size=16, chunk_length=2).save_pretrained(folder)
