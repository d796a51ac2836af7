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

FEATURES: Final = (
    *("text", "image", "stream", "structured", "forced", "tool", "session", "usage", "errors"),
)
OPTIONAL: Final = ("forced", "session")
"""Features that only some programs have: a second way of structured output, and conversations that
the server keeps.
"""

_SECTION: Final = re.compile(rf"^(?:#|//) ({'|'.join(FEATURES)})\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A client.

    Attributes:
        environment: The environment with the client; empty for the default one.
        lacks: Features that the client does not have, with the reason.
        lacks_before_vllm: Features that fail in front of vLLM only, with the reason.
        runs_before_vllm: Whether the tests run it in front of vLLM.
    """

    title: str
    program: str
    api: str
    environment: str = ""
    lacks: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    lacks_before_vllm: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    runs_before_vllm: bool = True

    @property
    def path(self) -> Path:
        return PROGRAMS / self.program

    def parts(self) -> tuple[str, dict[str, str]]:
        """Return the beginning, and the sections by their features."""
        beginning, *rest = _SECTION.split(self.path.read_text())
        return beginning, dict(zip(rest[::2], rest[1::2], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A benchmark client; its program sends `NUM_REQUESTS` requests with an image each."""

    title: str
    program: str
    environment: str

    @property
    def path(self) -> Path:
        return PROGRAMS / self.program


NUM_REQUESTS: Final = 16

ENVIRONMENTS: Final[Mapping[str, tuple[str, ...]]] = {
    "aiperf": ("aiperf",),
    "autogen": ("autogen-agentchat", "autogen-ext[openai]"),
    "dspy": ("dspy",),
    "guidellm": ("torch==2.13.0", "guidellm[vision]"),
    "haystack": ("haystack-ai",),
    "instructor": ("instructor",),
    "langchain": ("langchain", "langchain-anthropic", "langchain-openai"),
    "litellm": ("litellm[proxy]",),
    "llama-index": ("llama-index-llms-openai-like",),
    "llm": ("llm",),
    "magentic": ("magentic",),
    "node": (
        "ai",
        "@ai-sdk/openai-compatible",
        "@langchain/core",
        "@langchain/openai",
        "langchain",
        "zod",
    ),
    "open-webui": ("torch==2.13.0", "open-webui"),
    "openai-agents": ("openai-agents",),
    "pydantic-ai": ("pydantic-ai-slim[openai]",),
    "semantic-kernel": ("semantic-kernel",),
    "smolagents": ("smolagents[openai]",),
}
"""The packages of each environment, from pip or npm; some of them conflict.

Those with torch name a version, as pip would else take the newest, with CUDA's libraries.
"""

LARGE: Final = frozenset({"open-webui"})
"""Environments of several GB, which `make setup-clients` does not make."""

_NOT_STRICT: Final = (
    "vLLM enforces a tool's schema only with `strict`, and the small model needs that"
)

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
    ),
    Client(
        title="LangChain, agent",
        program="langchain_agent.py",
        api="chat completions",
        environment="langchain",
        runs_before_vllm=False,
    ),
    Client(
        title="LangChain, ChatAnthropic",
        program="langchain_anthropic_messages.py",
        api="Messages",
        environment="langchain",
        lacks_before_vllm={"forced": _NOT_STRICT},
    ),
    Client(
        title="LlamaIndex",
        program="llama_index_chat.py",
        api="chat completions",
        environment="llama-index",
        lacks_before_vllm={"forced": _NOT_STRICT},
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
        lacks={"tool": "it has tools for structured output only"},
        lacks_before_vllm={"forced": _NOT_STRICT},
    ),
    Client(
        title="pydantic-ai",
        program="pydantic_ai_chat.py",
        api="chat completions",
        environment="pydantic-ai",
    ),
    Client(
        title="OpenAI Agents SDK",
        program="openai_agents_responses.py",
        api="Responses",
        environment="openai-agents",
        lacks_before_vllm={"session": "vLLM has no Conversations API"},
    ),
    Client(
        title="AutoGen",
        program="autogen_chat.py",
        api="chat completions",
        environment="autogen",
    ),
    Client(
        title="DSPy",
        program="dspy_chat.py",
        api="chat completions",
        environment="dspy",
    ),
    Client(
        title="Haystack",
        program="haystack_chat.py",
        api="chat completions",
        environment="haystack",
    ),
    Client(
        title="magentic",
        program="magentic_chat.py",
        api="chat completions",
        environment="magentic",
        lacks_before_vllm={"structured": _NOT_STRICT, "tool": _NOT_STRICT},
    ),
    Client(
        title="Semantic Kernel",
        program="semantic_kernel_chat.py",
        api="chat completions",
        environment="semantic-kernel",
        lacks_before_vllm={"tool": "the small model's call is not valid without a grammar"},
    ),
    Client(
        title="smolagents",
        program="smolagents_chat.py",
        api="chat completions",
        environment="smolagents",
        lacks_before_vllm={"tool": _NOT_STRICT},
    ),
    Client(
        title="llm",
        program="llm_cli.sh",
        api="chat completions",
        environment="llm",
    ),
    Client(
        title="Open WebUI",
        program="open_webui_chat.py",
        api="chat completions",
        environment="open-webui",
    ),
    Client(
        title="Vercel's AI SDK",
        program="vercel_ai.mjs",
        api="chat completions",
        environment="node",
        lacks_before_vllm={"tool": "the small model does not call the tool without a grammar"},
    ),
    Client(
        title="LangChain.js",
        program="langchain_js.mjs",
        api="chat completions",
        environment="node",
        runs_before_vllm=False,
    ),
)

BENCHMARKS: Final = (
    Benchmark(title="AIPerf", program="aiperf.sh", environment="aiperf"),
    Benchmark(title="GuideLLM", program="guidellm.sh", environment="guidellm"),
)
