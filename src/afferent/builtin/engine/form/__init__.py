"""Response formats of answers, compiled in a separate process, which may fail at it."""
