"""Afferent: the multimodal data plane for LLM serving."""

__version__ = "0.1.0"
