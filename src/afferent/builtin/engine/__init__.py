"""Built-in engine: `transformers` models, for tests and small models."""
