"""Features as a library: from files to a model's inputs, here, in a pool, or through a server."""
