"""The APIs: each translates a request into our words, and the answer back."""
