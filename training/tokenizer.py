"""The built-in model's tokenizer: byte-level BPE over the training conversations.

Every byte is a token, so any text can be encoded; the merges shorten the words that the model
knows. The special tokens and the chat format follow the Qwen2-VL family.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import jinja2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from structured import FORCED, FREE, compact, draw_labels, sample

MAX_POSITIONS = 32_768
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
)

# Images are labelled "Picture N: " over the whole conversation, so that a small model can tell them
# apart. It was not trained with videos: they only have a place.
CHAT_TEMPLATE = """\
{%- set seen = namespace(pictures=0, videos=0) -%}
{%- if tools -%}
<|im_start|>tools
{% for tool in tools -%}
{{- tool.function | default(tool) | tojson(separators=(',', ':')) }}
{% endfor -%}
<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ 'tool' if message['role'] in ('tool', 'function') else message['role'] }}
{% if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] or [] -%}
{%- if part['type'] == 'image' -%}
{%- set seen.pictures = seen.pictures + 1 -%}
{{- 'Picture ' ~ seen.pictures ~ ': <|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' -%}
{%- set seen.videos = seen.videos + 1 -%}
{{- 'Video ' ~ seen.videos ~ ': <|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{%- set function = call.function | default(call) -%}
<tool_call>{"name":{{ function.name | tojson }},"arguments":
{{- function.arguments if function.arguments is string
    else function.arguments | tojson(separators=(',', ':')) -}}
}</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def train_tokenizer(*, vocab_size: int = 768, num_conversations: int = 20_000) -> Tokenizer:
    """Train the merges; the same arguments always give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
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
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def _texts(num_conversations: int) -> Iterator[str]:
    rng = random.Random(0)
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # noqa: S701 no HTML
    environment.filters["tojson"] = lambda value, **_: compact(value)
    template = environment.from_string(CHAT_TEMPLATE)
    marks = re.compile("|".join(map(re.escape, (*SPECIAL_TOKENS, FORCED, FREE))))
    for _ in range(num_conversations):
        drawn = sample(rng, draw_labels(rng))
        text = template.render(messages=drawn.messages, tools=drawn.tools)
        yield from marks.sub("\0", text).split("\0")
