"""Clients of the store: with an event loop, without one, or without a daemon."""
