"""What the store knows and decides: pure, events in, replies out."""
