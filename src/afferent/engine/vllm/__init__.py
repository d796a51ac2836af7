"""vLLM as an upstream: one that somebody else runs, or one that the server starts."""
