"""Proxy in front of a server with its own API: media are replaced by media handles."""
