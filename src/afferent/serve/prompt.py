"""Messages to prompt tokens, and answer tokens back to text.

This uses `tokenizers` and Jinja directly: `transformers` would bring torch, and with it 300 MB and
three seconds, into every frontend.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from afferent.errors import ConfigError, InternalError, InvalidRequest
from afferent.preprocess.family import Family, FeaturePlan, read_json
from afferent.serve.request import ImagePart, Message, SamplingDefaults, TextPart
from afferent.types import Placeholder


@dataclass(frozen=True, slots=True)
class Prompt:
    """``placeholders`` are in prompt order, one for each image."""

    token_ids: list[int]
    placeholders: list[Placeholder]


class PromptBuilder:
    """The chat template and the tokenizer of one model."""

    def __init__(self, folder: Path, family: Family) -> None:
        """Raises: ConfigError: The folder has no ``tokenizer.json`` or no chat template."""
        tokenizer_file = folder / "tokenizer.json"
        if not tokenizer_file.exists():
            raise ConfigError(f"{folder} has no tokenizer.json; save the model's fast tokenizer")
        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        # For text of clients in which special tokens are spelled out: there they are plain text.
        self._plain_tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self._plain_tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = tuple(token.content for token in added.values() if token.special)
        self._image_token_id = family.image_token_id
        self.max_token_characters = max(map(len, self._tokenizer.get_vocab()))
        """No text has fewer tokens than its characters divided by this."""
        self._template = _compile_template(folder)
        self._names = _special_names(folder)

    def build(self, messages: Sequence[Message], plans: Sequence[FeaturePlan]) -> Prompt:
        """The prompt's tokens, with each image's placeholder opened to its rows of embeddings.

        Raises:
            InvalidRequest: The model's chat template refuses the messages.
        """
        quoted: list[str] = []
        rendered = self._render([self._as_dict(message, quoted) for message in messages])
        marked = self._encode(rendered, quoted)
        if marked.count(self._image_token_id) != len(plans):
            raise InternalError("the chat template does not name each image once")
        token_ids: list[int] = []
        placeholders: list[Placeholder] = []
        remaining = iter(plans)
        for token in marked:
            if token == self._image_token_id:
                count = next(remaining).num_embeds
                placeholders.append(Placeholder(len(token_ids), count))
                token_ids += [token] * count
            else:
                token_ids.append(token)
        return Prompt(token_ids, placeholders)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer)

    def _as_dict(self, message: Message, quoted: list[str]) -> dict[str, Any]:
        content = []
        for part in message.parts:
            match part:
                case ImagePart():
                    content.append({"type": "image"})
                case TextPart(text):
                    content.append({"type": "text", "text": self._quote(text, quoted)})
        return {"role": message.role, "content": content}

    def _quote(self, text: str, quoted: list[str]) -> str:
        """``text``, or a stand-in for it if it spells out a special token."""
        if not any(special in text for special in self._special) and "\ue000" not in text:
            return text
        quoted.append(text)
        return f"\ue000{len(quoted) - 1}\ue000"

    def _encode(self, rendered: str, quoted: list[str]) -> list[int]:
        token_ids: list[int] = []
        for index, piece in enumerate(rendered.split("\ue000")):
            if index % 2:
                encoding = self._plain_tokenizer.encode(
                    quoted[int(piece)], add_special_tokens=False
                )
            else:
                encoding = self._tokenizer.encode(piece, add_special_tokens=False)
            token_ids += encoding.ids
        return token_ids

    def _render(self, messages: list[dict[str, Any]]) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._names
            )
        except _TemplateRefusal as error:
            raise InvalidRequest(f"the model's chat template: {error}", param="messages") from error
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                "the model's chat template can't express these messages", param="messages"
            ) from error


class Detokenizer:
    """Tokens to text, piece by piece: a character of several tokens comes with its last."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(self._stream.step(self._tokenizer, token) or "" for token in token_ids)


class _TemplateRefusal(jinja2.TemplateError):
    """A template has called ``raise_exception``."""


def _compile_template(folder: Path) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    file = folder / "chat_template.jinja"
    if file.exists():
        return environment.from_string(file.read_text())
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        template = read_json(path).get("chat_template") if path.exists() else None
        if isinstance(template, str):
            return environment.from_string(template)
    raise ConfigError(f"{folder} has no chat template")


def _special_names(folder: Path) -> dict[str, str]:
    """``bos_token`` and the like, which templates refer to."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    names = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(key)
        names[key] = value.get("content", "") if isinstance(value, dict) else value or ""
    return names


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().astimezone().strftime(format)


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=options.get("indent"))


def sampling_defaults(folder: Path) -> SamplingDefaults:
    """What the model's ``generation_config.json`` says; greedy if it says nothing."""
    path = folder / "generation_config.json"
    settings = read_json(path) if path.exists() else {}
    if not settings.get("do_sample"):
        return SamplingDefaults()
    return SamplingDefaults(
        temperature=settings.get("temperature") or 1.0,
        top_p=settings.get("top_p") or 1.0,
        top_k=settings.get("top_k") or 0,
    )
