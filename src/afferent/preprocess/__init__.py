"""Processing of media to features, in worker processes that write directly into the arena."""
