"""vLLM as an upstream: an external one, or one that the server starts."""
