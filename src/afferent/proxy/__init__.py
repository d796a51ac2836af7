"""Proxy in front of an engine's own API: media are replaced by media handles."""
