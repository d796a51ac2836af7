"""Media: from bytes in a request body or at a URL to features in the arena."""
