"""Core of the built-in engine: one process that decides what runs next, and sees no tensor."""
