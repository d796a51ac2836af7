"""Upstream of any kind that speaks OpenAI's chat completions, on this machine or on others."""
