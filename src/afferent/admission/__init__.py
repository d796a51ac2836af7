"""Limits on the number of concurrent requests, and fair scheduling. Pure logic without I/O."""
