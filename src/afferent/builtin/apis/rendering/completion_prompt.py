"""Requests of completions for a prompt: the prompt is a text, or its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from afferent.builtin.apis.completions.api import DEFAULT_MAX_TOKENS, Text, read_prompt
from afferent.builtin.apis.rendering.prompt_request import PromptRequest
from afferent.builtin.pipeline.request import VllmRules
from afferent.media.body.raw import RawMedia


class CompletionPrompt(PromptRequest, kw_only=True):
    """Completion whose prompt is requested."""

    unsupported: ClassVar[Mapping[str, Sequence[Any]]] = {
        "add_special_tokens": (True,),
        "prompt_embeds": (),
        "suffix": ("",),
        "truncate_prompt_tokens": (),
    }

    prompt: Text
    max_tokens: int | None = None

    @property
    def answer_tokens(self) -> int | None:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def content(self, media: Mapping[str, RawMedia], rules: VllmRules) -> str | tuple[int, ...]:
        return read_prompt(self.prompt)
