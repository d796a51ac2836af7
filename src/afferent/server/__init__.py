"""What makes a server of its processes: which there are, and who restarts them."""
