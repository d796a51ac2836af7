"""Workers of the built-in engine: views over the arena, and their cached embeddings."""
