"""In front of a server with an API of its own: requests are passed on, with references to media."""
