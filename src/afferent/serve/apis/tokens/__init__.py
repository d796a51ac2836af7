"""Text and conversations to tokens, and tokens to text."""
