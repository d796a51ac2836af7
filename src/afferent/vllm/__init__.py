"""Offline vLLM with images that a pool of workers prepares while the engine runs.

The package `vllm` is imported when an `LLM` is created.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from afferent.lazy import face

__all__ = ["LLM"]

if TYPE_CHECKING:
    from afferent.vllm.llm import LLM
else:  # a test compares this table with the imports above
    __getattr__, __dir__ = face(globals(), homes={"afferent.vllm.llm": "LLM"}, modules={})
