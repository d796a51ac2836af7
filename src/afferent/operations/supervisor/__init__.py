"""Server: the list of its processes, their start, and their supervision."""
