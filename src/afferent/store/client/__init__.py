"""The store as a process uses it: with an event loop, without one, or with no daemon."""
