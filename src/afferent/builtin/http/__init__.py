"""Endpoints of the built-in APIs."""
