"""Conversion of text and conversations to tokens, and of tokens to text."""
