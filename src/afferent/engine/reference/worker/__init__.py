"""Its workers: views over the arena, and the embeddings that they keep."""
