"""The built-in model's tokenizer: byte-level BPE over the training conversations.

Every byte is a token, so any text can be encoded; the merges shorten the words that the model
knows. The special tokens and the chat format follow the Qwen2-VL family.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dialogue import sample_conversation, sample_labels

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# Images are labelled "Picture N: " over the whole conversation, so that a small model can tell them
# apart.
CHAT_TEMPLATE = """\
{%- set seen = namespace(pictures=0) -%}
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{%- set seen.pictures = seen.pictures + 1 -%}
{{- 'Picture ' ~ seen.pictures ~ ': <|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def train_tokenizer(*, vocab_size: int = 1024, num_conversations: int = 20_000) -> Tokenizer:
    """Train the merges; the same arguments always give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(num_conversations), trainer)
    return tokenizer


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Return the tokenizer as `transformers` saves and loads it, with its chat template."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<|endoftext|>",)],
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def _texts(num_conversations: int) -> Iterator[str]:
    rng = random.Random(0)
    for _ in range(num_conversations):
        for message in sample_conversation(rng, sample_labels(rng)):
            content = message["content"]
            if isinstance(content, str):
                yield content
            else:
                yield from (part["text"] for part in content if part["type"] == "text")
                yield "Picture 1: "
