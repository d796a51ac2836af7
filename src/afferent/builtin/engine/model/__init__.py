"""Model of the built-in engine: one rank of it, in one process."""
