"""OpenAI completions: the continuation of a text."""
