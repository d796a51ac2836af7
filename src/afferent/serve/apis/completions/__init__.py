"""OpenAI completions: text that is gone on with."""
