"""The clients that are tried: by a program each, of which `docs/clients.md` is made, too.

A program is a beginning, and a section for each feature behind a comment of one word. It prints
what `EXPECTED` says; sections of Python programs know what stands before them, others begin anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

PROGRAMS: Final = Path(__file__).parent / "programs"

URL: Final = "http://127.0.0.1:8000"
"""Of the server that the programs ask."""

STRUCTURED: Final = True
"""Whether the built-in engine gives answers that follow a schema."""

FEATURES: Final = ("text", "image", "stream", "structured", "usage", "errors")

_SECTION: Final = re.compile(rf"^(?:#|//) ({'|'.join(FEATURES)})\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """``lacks`` says of features that the client has no place for, what it has instead."""

    title: str
    program: str
    api: str
    environment: str = ""
    """Where it is installed; nowhere, for those of the default one."""
    advice: str = ""
    lacks: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def path(self) -> Path:
        return PROGRAMS / self.program

    def parts(self) -> tuple[str, dict[str, str]]:
        """The beginning, and the sections by their features."""
        beginning, *rest = _SECTION.split(self.path.read_text())
        return beginning, dict(zip(rest[::2], rest[1::2], strict=True))


ENVIRONMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "instructor": ("instructor",),
    "langchain": ("langchain-anthropic", "langchain-openai"),
    "litellm": ("litellm[proxy]",),
    "llama-index": ("llama-index-llms-openai-like",),
    "llm": ("llm",),
    "node": ("ai", "@ai-sdk/openai-compatible", "zod"),
    "pydantic-ai": ("pydantic-ai-slim[openai]",),
}
"""What is installed into each, by pip or npm: together they could not be."""

CLIENTS: Final = (
    Client(
        title="OpenAI, chat completions",
        program="openai_chat.py",
        api="chat completions",
    ),
    Client(
        title="OpenAI, Responses",
        program="openai_responses.py",
        api="Responses",
    ),
    Client(
        title="Anthropic",
        program="anthropic_messages.py",
        api="Messages",
    ),
    Client(
        title="LangChain, ChatOpenAI",
        program="langchain_openai_chat.py",
        api="chat completions",
        environment="langchain",
        advice='`method="json_schema"`; `function_calling` calls a tool.',
    ),
    Client(
        title="LangChain, ChatAnthropic",
        program="langchain_anthropic_messages.py",
        api="Messages",
        environment="langchain",
        advice='`method="json_schema"`; the default, `function_calling`, calls a tool.',
    ),
    Client(
        title="LlamaIndex",
        program="llama_index_chat.py",
        api="chat completions",
        environment="llama-index",
        advice="`OpenAILike(should_use_structured_outputs=True)`; without it a tool is called.",
    ),
    Client(
        title="LiteLLM, completion",
        program="litellm_completion.py",
        api="chat completions",
        environment="litellm",
    ),
    Client(
        title="LiteLLM, responses",
        program="litellm_responses.py",
        api="Responses",
        environment="litellm",
    ),
    Client(
        title="LiteLLM, Anthropic messages",
        program="litellm_messages.py",
        api="Messages",
        environment="litellm",
    ),
    Client(
        title="instructor",
        program="instructor_chat.py",
        api="chat completions",
        environment="instructor",
        advice="`mode=instructor.Mode.JSON_SCHEMA`; the default, `TOOLS`, calls a tool.",
    ),
    Client(
        title="pydantic-ai",
        program="pydantic_ai_chat.py",
        api="chat completions",
        environment="pydantic-ai",
        advice="`NativeOutput(...)` around the type; without it a tool is called.",
    ),
    Client(
        title="llm",
        program="llm_cli.sh",
        api="chat completions",
        environment="llm",
    ),
    Client(
        title="Vercel's AI SDK",
        program="vercel_ai.mjs",
        api="chat completions",
        environment="node",
        advice="`supportsStructuredOutputs: true`; without it no schema is sent.",
    ),
)
