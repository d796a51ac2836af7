"""The tested clients, with a program for each; the programs are also the source of docs/clients.md.

A program has a beginning, and a section for each feature, behind a comment of one word. It prints
the text in `EXPECTED`. Sections of Python programs run one after another; in other languages, each
runs separately behind the beginning.
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
"""The URL of the server in the programs."""

STRUCTURED: Final = True
"""Whether the built-in engine supports structured output."""

FEATURES: Final = ("text", "image", "stream", "structured", "usage", "errors")

_SECTION: Final = re.compile(rf"^(?:#|//) ({'|'.join(FEATURES)})\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A client; ``lacks`` has the features without support in the client, and a replacement."""

    title: str
    program: str
    api: str
    environment: str = ""
    """The environment with the client; empty for the default one."""
    advice: str = ""
    lacks: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def path(self) -> Path:
        return PROGRAMS / self.program

    def parts(self) -> tuple[str, dict[str, str]]:
        """Return the beginning, and the sections by their features."""
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
"""The packages of each environment, from pip or npm; some of them conflict."""

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
