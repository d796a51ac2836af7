"""The engine: what any engine must offer, and the built-in one on `transformers`."""
