"""The reference engine: `transformers` models, for tests and small models."""
