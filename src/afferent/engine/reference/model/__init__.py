"""The model itself: one rank of it, in one process."""
