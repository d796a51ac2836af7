"""Model folders with random weights, as `transformers` saves them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
    WhisperFeatureExtractor,
)

from afferent.media.decoded import Media
from afferent.media.families.registry import AnyFamily
from afferent.store.block import codec
from training import one_token

_LLAVA_TEMPLATE = """\
{%- for message in messages -%}
{{ message['role'].upper() }}:
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' %} <image>
{%- else %} {{ part['text'] }}
{%- endif -%}
{%- endfor %}
{% endfor -%}
{%- if add_generation_prompt %}ASSISTANT:{% endif -%}
"""


def make_features(family: AnyFamily, media: Media) -> dict[str, Any]:
    """Return the tensors that a worker would write, in private memory."""
    plan = codec.plan(family.plan_exactly(media.header).tree)
    out: dict[str, Any] = codec.lay_out(plan, memoryview(bytearray(plan.nbytes)))
    out.pop("prompt")
    family.process(media, out)
    return out


def _tokenizer(media_token: str, special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer with a token for media, and further ``special`` ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(dict.fromkeys(["<s>", "</s>", "<pad>", media_token, *special])),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["USER: What is in the picture? ASSISTANT:"] * 8, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=list(dict.fromkeys([media_token, *special])),
    )


def make_llava(folder: Path, *, hidden_size: int = 32) -> None:
    """Write a tiny LLaVA: a CLIP tower, and a Llama language model with two heads."""
    wrapped = _tokenizer("<image>")
    image_token = wrapped.convert_tokens_to_ids("<image>")
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=56,
                patch_size=14,
                projection_dim=32,
            ),
            text_config=LlamaConfig(
                hidden_size=hidden_size,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                vocab_size=320,
                max_position_embeddings=512,
                bos_token_id=wrapped.bos_token_id,
                eos_token_id=wrapped.eos_token_id,
                pad_token_id=wrapped.pad_token_id,
                initializer_range=0.3,  # large weights, so that the picture changes the tokens
            ),
            image_token_id=image_token,
            vision_feature_layer=-1,
        )
    )
    model.generation_config.eos_token_id = wrapped.eos_token_id
    model.save_pretrained(folder)
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
        ),
        tokenizer=wrapped,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_LLAVA_TEMPLATE,
    ).save_pretrained(folder)


def make_one_token(folder: Path, *, num_positions: int = one_token.MAX_POSITIONS) -> None:
    """Write the model of `training.one_token` with random weights: an item is three tokens."""
    tokenizer = one_token.make_tokenizer()
    torch.manual_seed(0)
    model = one_token.make_model(tokenizer, num_positions=num_positions)
    one_token.save(folder, tokenizer, model)


_VOXTRAL_TEMPLATE = """\
{%- for message in messages -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'audio' %}[AUDIO]
{%- else %} {{ part['text'] }}
{%- endif -%}
{%- endfor %}
{% endfor -%}
"""


def make_voxtral(folder: Path) -> None:
    """Write a tiny Voxtral: Whisper's encoder for clips of 2 s, and a Llama language model."""
    wrapped = _tokenizer("[AUDIO]")
    wrapped.chat_template = _VOXTRAL_TEMPLATE
    torch.manual_seed(0)
    model = VoxtralForConditionalGeneration(
        VoxtralConfig(
            audio_config={
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_mel_bins": 16,
                "max_source_positions": 100,
            },
            text_config={
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "vocab_size": 320,
                "max_position_embeddings": 512,
                "bos_token_id": wrapped.bos_token_id,
                "eos_token_id": wrapped.eos_token_id,
                "pad_token_id": wrapped.pad_token_id,
                "initializer_range": 0.3,
            },
            audio_token_id=wrapped.convert_tokens_to_ids("[AUDIO]"),
        )
    )
    model.generation_config.eos_token_id = wrapped.eos_token_id
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16, chunk_length=2).save_pretrained(folder)
