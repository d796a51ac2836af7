"""What clients and the store daemon say to each other."""
