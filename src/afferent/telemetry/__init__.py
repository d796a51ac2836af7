"""Metrics, their sums over all processes, and the traces of requests."""
