"""The store daemon, and how to start it."""
