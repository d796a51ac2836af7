"""Preprocess workers: confined processes that write features directly into the arena."""
