"""Requests of chat completions for a prompt, as vLLM reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from afferent.builtin.apis.chat.tools import ChatTool
from afferent.builtin.apis.rendering.prompt_request import (
    Conversation,
    PromptRequest,
    Turns,
)
from afferent.builtin.apis.rendering.vllm_turns import in_order_of_chat
from afferent.builtin.pipeline.request import VllmRules
from afferent.errors import InvalidRequest
from afferent.media.body.raw import RawMedia


class ChatPrompt(PromptRequest, kw_only=True):
    """Chat completion whose prompt is requested."""

    unsupported: ClassVar[Mapping[str, Sequence[Any]]] = {
        "chat_template": (),
        "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},),
        "truncate_prompt_tokens": (),
        "add_special_tokens": (False,),
    }

    messages: Turns
    tools: list[ChatTool] | None = None
    tool_choice: Any = None
    documents: list[dict[str, str]] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    max_tokens: int | None = None
    max_completion_tokens: int | None = None

    @property
    def answer_tokens(self) -> int | None:
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given

    def content(self, media: Mapping[str, RawMedia], rules: VllmRules) -> Conversation:
        self._check_tools()
        is_excluded = self.tool_choice == "none" and rules.excludes_unused_tools
        tools = None if self.tools is None or is_excluded else self.tools
        return Conversation(
            turns=[in_order_of_chat(turn) for turn in self.messages],
            tools=None if tools is None else [tool.for_template() for tool in tools],
            documents=self.documents,
            effort=self.reasoning_effort,
            begins_answer=self.add_generation_prompt,
            continues_last=self.continue_final_message,
        )

    def _check_tools(self) -> None:
        """Check the tools and the choice of one.

        Raises:
            InvalidRequest: There are none, or the chosen one is not among them.
        """
        if self.tools is not None and not self.tools:
            raise InvalidRequest("tools is empty: leave it out, or name one", param="tools")
        if self.tool_choice in (None, "none"):
            return
        if self.tools is None:
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        if self.tool_choice in ("auto", "required"):
            return
        chosen = self.tool_choice.get("function") if isinstance(self.tool_choice, dict) else None
        name = chosen.get("name") if isinstance(chosen, dict) else None
        if name not in [tool.function.name for tool in self.tools]:
            raise InvalidRequest(
                "tool_choice is none, auto, required, or names one of the tools",
                param="tool_choice",
            )
