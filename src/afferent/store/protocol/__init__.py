"""Messages between clients and the store daemon."""
