"""From a request's parts to media bytes in the arena, and what their headers say."""
