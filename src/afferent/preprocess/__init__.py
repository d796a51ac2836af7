"""From media bytes to features, in worker processes that write straight into the arena."""
