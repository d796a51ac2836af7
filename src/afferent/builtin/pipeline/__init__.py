"""Pipeline of a request of the built-in APIs: messages to tokens, tokens to text."""
