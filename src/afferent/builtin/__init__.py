"""Built-in engine with its own APIs and its pipeline. No other package imports it."""
