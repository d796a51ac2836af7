"""State of the store and its decisions. Pure: events in, replies out."""
