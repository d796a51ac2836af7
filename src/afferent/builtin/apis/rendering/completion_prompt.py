"""Requests of completions for prompts: each is a text, or its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from afferent.builtin.apis.completions.api import DEFAULT_MAX_TOKENS, Text, read_prompts
from afferent.builtin.apis.rendering.prompt_request import PromptRequest, Texts
from afferent.builtin.pipeline.request import Truncation, VllmRules
from afferent.media.body.raw import RawMedia


class CompletionPrompt(PromptRequest, kw_only=True):
    """Completion whose prompts are requested."""

    unsupported: ClassVar[Mapping[str, Sequence[Any]]] = {"prompt_embeds": (), "suffix": ("",)}

    prompt: Text
    max_tokens: int | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None

    @property
    def answer_tokens(self) -> int | None:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def content(self, media: Mapping[str, RawMedia], rules: VllmRules) -> Texts:
        limit, side = self.truncate_prompt_tokens, self.truncation_side
        return Texts(
            prompts=read_prompts(self.prompt),
            adds_special=self.add_special_tokens,
            truncation=None if limit is None else Truncation(limit, side),
        )
