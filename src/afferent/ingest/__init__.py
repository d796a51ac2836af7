"""Ingest: from a request's parts to media bytes in the arena, and the values of their headers."""
